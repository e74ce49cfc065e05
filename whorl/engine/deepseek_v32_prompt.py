"""The chat prompt of DeepSeek-V3.2. The model ships no Jinja template; its authors publish a program instead.

The texts are theirs, to the letter, because the model was trained on them; `docs/deepseek_v32.md` has the rules.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_BAR, _SPACE = "\uff5c", "\u2581"  # a wide |, and the lower block that stands for a space in the name of a token
BEGIN, END = (f"<{_BAR}{which}{_SPACE}of{_SPACE}sentence{_BAR}>" for which in ("begin", "end"))
USER, ASSISTANT = f"<{_BAR}User{_BAR}>", f"<{_BAR}Assistant{_BAR}>"
DSML = f"{_BAR}DSML{_BAR}"
_THINK, _END_THINK = "<think>", "</think>"
_QUESTIONS = ("user", "developer")
_ROLES = ("system", "developer", "user", "assistant", "tool")

_TOOLS = """\
## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<DSML:function_calls>" block like the following as part of your reply to the \
user:
<DSML:function_calls>
<DSML:invoke name="$FUNCTION_NAME">
<DSML:parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</DSML:parameter>
...
</DSML:invoke>
<DSML:invoke name="$FUNCTION_NAME2">
...
</DSML:invoke>
</DSML:function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<DSML:function_calls>
...
</DSML:function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
""".replace("DSML:", DSML)
_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class DeepSeekV32Prompt:
    """Replaces a `ChatTemplate`: it has the same `render`. `sources` is empty, because there is no template."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.sources: dict[str, str] = {}
        self.variables = dict(variables)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        thinking: bool | None = None,
        response_format: Any = None,
        **unknown: Any,
    ) -> str:
        """Return the prompt. thinking: the name of `enable_thinking` in other servers; without either, thinking is off.

        A message may have its own `tools` and `response_format`; those of the request are added to the first message
        if it is a system or developer message, else before it. `prefix`: true of an assistant's message leaves its turn
        open. Raises ValueError for unknown variables, which would have no effect, and for malformed messages.
        """
        if unknown:
            has = "enable_thinking, thinking, response_format"
            raise ValueError(f"chat template: DeepSeek-V3.2 has no variable {sorted(unknown)[0]!r}. Has: {has}")
        all_messages = _with_tools(messages, tools, response_format)
        does_think = bool(thinking if enable_thinking is None else enable_thinking)
        return BEGIN + "".join(_Turns(all_messages, does_think, add_generation_prompt).texts())


def _with_tools(messages: Sequence[Message], tools: Any, response_format: Any) -> list[Message]:
    """Return the messages with the request's tools and response format added to the first, see `render`."""
    more = {"tools": tools} if tools else {}
    if response_format is not None:
        more["response_format"] = response_format
    if not more:
        return list(messages)
    if messages and messages[0].get("role") in ("system", "developer"):
        return [{**messages[0], **more}, *messages[1:]]
    return [{"role": "system", "content": "", **more}, *messages]


class _Turns:
    """Writes the text of each message, which depends on the messages around it.

    opens_reply: the prompt ends with the beginning of an assistant's turn.
    """

    def __init__(self, messages: Sequence[Message], does_think: bool, opens_reply: bool) -> None:
        self._messages, self._does_think, self._opens_reply = messages, does_think, opens_reply
        questions = [i for i, message in enumerate(messages) if message.get("role") in _QUESTIONS]
        self._last_question = questions[-1] if questions else -1

    def texts(self) -> Iterator[str]:
        """Yield the text of each message."""
        for at, message in enumerate(self._messages):
            role = message.get("role")
            if role not in _ROLES:
                raise ValueError(f"message {at} has the role {role!r}, expected one of {', '.join(_ROLES)}")
            yield getattr(self, f"_{role}")(at, message)

    def _system(self, at: int, message: Message) -> str:
        return "\n\n".join([_text(message), *_sections(message)])

    def _user(self, at: int, message: Message) -> str:
        return f"{USER}{_text(message)}{self._opening(at, is_last=at == len(self._messages) - 1, before=ASSISTANT)}"

    def _developer(self, at: int, message: Message) -> str:
        if not _text(message):
            raise ValueError(f"message {at}, of the developer, is empty")
        text = "\n\n".join(["", *_sections(message), f"# The user's message is: {_text(message)}"])
        return self._user(at, {"content": text})

    def _opening(self, at: int, *, is_last: bool, before: str) -> str:
        """Return the beginning of the assistant's next turn; empty at the end of a prompt without a reply."""
        if is_last and not self._opens_reply:
            return ""
        return before + (_THINK if self._does_think and at >= self._last_question else _END_THINK)

    def _assistant(self, at: int, message: Message) -> str:
        """Return an assistant's turn: reasoning since the last question, text, calls, and the end token unless open."""
        reasoning, text = _split_reasoning(message)
        calls = message.get("tool_calls") or ()
        is_open = bool(message.get("prefix"))
        thought = ""
        if self._does_think and at > self._last_question:  # earlier reasoning is left out of the prompt
            if not (reasoning or calls or is_open):
                raise ValueError(
                    f"message {at}, of the assistant, has neither reasoning_content nor tool_calls; with thinking on, "
                    "send its reasoning since the last question back"
                )
            thought = reasoning if is_open and not text and not calls else reasoning + _END_THINK
        return f"{thought}{text}{_calls(at, calls)}{'' if is_open else END}"

    def _tool(self, at: int, message: Message) -> str:
        """Return all results of a turn at its first tool message, in the order of the calls; others give nothing."""
        first = at
        while first > 0 and self._messages[first - 1].get("role") == "tool":
            first -= 1
        if first < at:
            return ""
        end = at
        while end < len(self._messages) and self._messages[end].get("role") == "tool":
            end += 1
        calls = (self._messages[at - 1].get("tool_calls") or ()) if at else ()
        results = _in_order(at, self._messages[at:end], calls)
        lines = "".join(f"\n<result>{_text(result)}</result>" for result in results)
        opening = self._opening(at, is_last=end == len(self._messages), before="\n\n")
        return f"\n\n<function_results>{lines}\n</function_results>{opening}"


def _in_order(at: int, results: Sequence[Message], calls: Sequence[Any]) -> list[Message]:
    """Return the results in the order of their calls; as they are if ids are missing or not unique. ValueError if the
    results do not belong to the calls. at: index of the first result's message, for errors."""
    if len(results) != len(calls):
        raise ValueError(f"message {at}: {len(results)} results of tools after {len(calls)} calls, expected one each")
    call_ids, result_ids = [call.get("id") for call in calls], [result.get("tool_call_id") for result in results]
    if None in call_ids or None in result_ids or len(set(call_ids)) < len(call_ids):
        return list(results)
    if set(call_ids) != set(result_ids):
        raise ValueError(f"message {at}: results have the tool_call_ids {result_ids}, expected {call_ids}")
    return [results[result_ids.index(name)] for name in call_ids]


def _text(message: Message) -> str:
    return message.get("content") or ""


def _split_reasoning(message: Message) -> tuple[str, str]:
    """Return an assistant's reasoning and text; some clients send both as content."""
    reasoning, text = message.get("reasoning_content") or "", _text(message)
    if not reasoning and _END_THINK in text:
        reasoning, _, text = text.partition(_END_THINK)
        reasoning = reasoning.removeprefix(_THINK)
    return reasoning, text


def _sections(message: Message) -> list[str]:
    """Return the sections on tools and on the response format."""
    sections = []
    if tools := message.get("tools"):
        sections.append(_TOOLS + "".join(f"{_json(tool['function'])}\n" for tool in tools) + "</functions>\n")
    if message.get("response_format") is not None:
        sections.append(_FORMAT + _json(message["response_format"]))
    return sections


def _calls(at: int, calls: Sequence[Any]) -> str:
    if not calls:
        return ""
    invokes = "".join(_invoke(at, call["function"]) for call in calls)
    return f"\n\n<{DSML}function_calls>\n{invokes}</{DSML}function_calls>"


def _invoke(at: int, function: Mapping[str, Any]) -> str:
    name, arguments = function["name"], function.get("arguments", {})
    try:
        parameters = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        parameters = None
    if not isinstance(parameters, Mapping):
        raise ValueError(f"message {at}: the arguments of {name!r} are not a JSON object")
    lines = "\n".join(_parameter(key, value) for key, value in parameters.items())
    return f'<{DSML}invoke name="{name}">\n{lines}\n</{DSML}invoke>\n'


def _parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else _json(value)
    return f'<{DSML}parameter name="{name}" string="{"true" if is_text else "false"}">{text}</{DSML}parameter>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
