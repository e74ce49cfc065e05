"""How DeepSeek-V3.2 is spoken to. It ships no Jinja template: its makers say in a program how a prompt is written.

What the words are is theirs, to the letter, as the model was trained on them; `docs/deepseek_v32.md` has the rules.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .chat_template import Message

_BAR, _SPACE = "\uff5c", "\u2581"  # a wide |, and the lower block that stands for a space in a token's name
BEGIN, END = (f"<{_BAR}{which}{_SPACE}of{_SPACE}sentence{_BAR}>" for which in ("begin", "end"))
USER, ASSISTANT = f"<{_BAR}User{_BAR}>", f"<{_BAR}Assistant{_BAR}>"
DSML = f"{_BAR}DSML{_BAR}"
_THINK, _END_THINK = "<think>", "</think>"
_ASKS = ("user", "developer")
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
    """In the place of a `ChatTemplate`: the same `render`. `sources` has no template to show."""

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
        """`thinking` is the name that other servers give to `enable_thinking`; neither: off. A name that is not known
        is refused, as nothing would come of it.

        A message may have `tools` and `response_format` of its own; those of the request go to the first message if
        it is a system or developer message, else in front. An assistant's `prefix`: true leaves its turn open.
        """
        if unknown:
            has = "enable_thinking, thinking, response_format"
            raise ValueError(f"chat template: DeepSeek-V3.2 has no variable {sorted(unknown)[0]!r}. Has: {has}")
        given = _with_tools(messages, tools, response_format)
        does_think = bool(thinking if enable_thinking is None else enable_thinking)
        return BEGIN + "".join(_Turns(given, does_think, add_generation_prompt).texts())


def _with_tools(messages: Sequence[Message], tools: Any, response_format: Any) -> list[Message]:
    more = {"tools": tools} if tools else {}
    if response_format is not None:
        more["response_format"] = response_format
    if not more:
        return list(messages)
    if messages and messages[0].get("role") in ("system", "developer"):
        return [{**messages[0], **more}, *messages[1:]]
    return [{"role": "system", "content": "", **more}, *messages]


class _Turns:
    """The text of each message, which depends on those around it."""

    def __init__(self, messages: Sequence[Message], does_think: bool, is_asked: bool) -> None:
        self._messages, self._does_think, self._is_asked = messages, does_think, is_asked
        asks = [at for at, message in enumerate(messages) if message.get("role") in _ASKS]
        self._last_ask = asks[-1] if asks else -1

    def texts(self) -> Iterator[str]:
        for at, message in enumerate(self._messages):
            role = message.get("role")
            if role not in _ROLES:
                raise ValueError(f"message {at} is of the role {role!r}, expected one of {', '.join(_ROLES)}")
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
        """What the assistant's next turn begins with; nothing at the end of a prompt that asks for none."""
        if is_last and not self._is_asked:
            return ""
        return before + (_THINK if self._does_think and at >= self._last_ask else _END_THINK)

    def _assistant(self, at: int, message: Message) -> str:
        reasoning, text = _apart(message)
        calls = message.get("tool_calls") or ()
        is_open = bool(message.get("prefix"))
        thought = ""
        if self._does_think and at > self._last_ask:  # earlier thoughts are not shown to the model again
            if not (reasoning or calls or is_open):
                raise ValueError(
                    f"message {at}, of the assistant, has neither reasoning_content nor tool_calls: with thinking on, "
                    "what it thought since the last question must be given back"
                )
            thought = reasoning if is_open and not text and not calls else reasoning + _END_THINK
        return f"{thought}{text}{_calls(at, calls)}{'' if is_open else END}"

    def _tool(self, at: int, message: Message) -> str:
        """All results of a turn at once, in the order of its calls."""
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
    if len(results) != len(calls):
        raise ValueError(f"message {at}: {len(results)} results of tools behind {len(calls)} calls, expected one each")
    asked, given = [call.get("id") for call in calls], [result.get("tool_call_id") for result in results]
    if None in asked or None in given or len(set(asked)) < len(asked):
        return list(results)
    if set(asked) != set(given):
        raise ValueError(f"message {at}: results are of the calls {given}, and the calls are {asked}")
    return [results[given.index(name)] for name in asked]


def _text(message: Message) -> str:
    return message.get("content") or ""


def _apart(message: Message) -> tuple[str, str]:
    """An assistant's reasoning and text; a client that does not tell them apart sends both as content."""
    reasoning, text = message.get("reasoning_content") or "", _text(message)
    if not reasoning and _END_THINK in text:
        reasoning, _, text = text.partition(_END_THINK)
        reasoning = reasoning.removeprefix(_THINK)
    return reasoning, text


def _sections(message: Message) -> list[str]:
    found = []
    if tools := message.get("tools"):
        found.append(_TOOLS + "".join(f"{_json(tool['function'])}\n" for tool in tools) + "</functions>\n")
    if message.get("response_format") is not None:
        found.append(_FORMAT + _json(message["response_format"]))
    return found


def _calls(at: int, calls: Sequence[Any]) -> str:
    if not calls:
        return ""
    invokes = "".join(_invoke(at, call["function"]) for call in calls)
    return f"\n\n<{DSML}function_calls>\n{invokes}</{DSML}function_calls>"


def _invoke(at: int, function: Mapping[str, Any]) -> str:
    name, arguments = function["name"], function.get("arguments", {})
    try:
        found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise ValueError(f"message {at}: the arguments of {name!r} are not a JSON object")
    lines = "\n".join(_parameter(key, value) for key, value in found.items())
    return f'<{DSML}invoke name="{name}">\n{lines}\n</{DSML}invoke>\n'


def _parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    shown = value if is_text else _json(value)
    return f'<{DSML}parameter name="{name}" string="{"true" if is_text else "false"}">{shown}</{DSML}parameter>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
