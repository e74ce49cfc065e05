"""The grammar that forces a tool call, in the form in which the model writes calls."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whorl.engine.call_forms import CallReader, JsonCalls, TaggedCalls
from whorl.engine.grammar_masks import json_layout

from .api_error import ApiError
from .schema_parts import NamedTool, Tool

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

_ANY_NAME = "/[a-zA-Z0-9_.-]+/"
_EMPTY = '""'
_DEFINITIONS = ("$defs", "definitions")


def call_grammar(
    form: type[CallReader],
    tools: Sequence[Tool],
    choice: NamedTool | str,
    *,
    is_parallel: bool,
    tokenizer: "Tokenizer",
) -> str:
    """Return a grammar in llguidance's Lark that accepts exactly the calls of the chosen tools.

    is_parallel: several calls may follow each other. Raises ApiError 400 when the form of calls has no grammar.
    """
    chosen = [t for t in tools if isinstance(choice, str) or t.function.name == choice.function.name]
    has_more = is_parallel and isinstance(choice, str)
    if issubclass(form, JsonCalls):
        return _json_grammar(form, chosen, has_more, _Quotes(tokenizer))
    if issubclass(form, TaggedCalls):
        return _tagged_grammar(form, chosen, has_more, _Quotes(tokenizer))
    message = f"tool_choice: the tool parser {form.__name__} has no grammar that could force a call: use auto"
    raise ApiError(400, message, param="tool_choice")


class _Quotes:
    """Quotes texts for a grammar. Special tokens are written as ids, as no quoted string would match them."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._ids = {tokenizer.token(i): i for i in tokenizer.added_ids}
        names = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def __call__(self, text: str) -> str:
        parts, start = [], 0
        for token in self._pattern.finditer(text):
            parts += [_string(text[start : token.start()]), f"<[{self._ids[token[0]]}]>"]
            start = token.end()
        return " ".join(part for part in [*parts, _string(text[start:])] if part != _EMPTY)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    """Return the Lark expression for values of a JSON schema."""
    return f"%json {json.dumps(schema | {'x-guidance': json_layout(schema)})}"


# ---- calls that are JSON


def _json_grammar(form: type[JsonCalls], tools: Sequence[Tool], has_more: bool, quoted: _Quotes) -> str:
    """Return the grammar of one call, or with `has_more` of one or more, as JSON objects."""
    repetition = f" ({quoted(form.between)} call)*" if has_more else ""
    end = quoted(f"\n{form.end}") if form.end else ""
    bodies = [f"body{number}: {_json(_call_schema(tool, form.arguments))}" for number, tool in enumerate(tools)]
    body = " | ".join(f"body{number}" for number in range(len(tools)))
    return "\n".join([f"start: call{repetition}", f"call: {quoted(form.begin)} ({body}) {end}", *bodies, ""])


def _call_schema(tool: Tool, name: str) -> dict[str, Any]:
    """Return the JSON schema of a call of a tool. name: of the member that holds the arguments."""
    arguments = tool.function.parameters or {"type": "object"}
    return _definitions(arguments) | {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, name: arguments},
        "required": ["name", name],
        "additionalProperties": False,
    }


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions that a schema's references point to, which must stand at the root."""
    return {kind: schema[kind] for kind in _DEFINITIONS if kind in schema}


# ---- calls whose parameters are tags


def _tagged_grammar(form: type[TaggedCalls], tools: Sequence[Tool], has_more: bool, quoted: _Quotes) -> str:
    """Return the grammar of one call, or with `has_more` of one or more, with parameters in tags."""
    calls = " | ".join(f"call{number}" for number in range(len(tools)))
    # GLM's section is the call: its name follows the opening tag at once, and no tag closes the section.
    begin = quoted(f"{form.open}\n" if form.begin else form.open)
    end = quoted(f"\n{form.close}" if form.close else "")
    calls_rule = 'call ("\\n" call)*' if has_more else "call"
    if form.is_alone:
        repetition = ' ("\\n" block)*' if has_more else ""
        start = f"block{repetition}\nblock: {begin} call {end}"
    else:
        start = f"{begin} {calls_rule} {end}"
    lines = [f"start: {quoted(form.before)} {start}", f"call: {calls}"]
    for number, tool in enumerate(tools):
        lines += _Call(form, number, tool, quoted).rules()
    return "\n".join(lines) + "\n"


class _Call:
    """Builds the grammar rules of one tool."""

    def __init__(self, form: type[TaggedCalls], number: int, tool: Tool, quoted: _Quotes) -> None:
        self._form, self._number, self._tool, self._quoted = form, number, tool, quoted
        self._parameters = tool.function.parameters or {}
        self._line = "\n" if form.has_lines else ""

    def rules(self) -> list[str]:
        """Return the rule of the call, then those of its parameters, which come in the order of the schema."""
        # A client wrote the schema, so its fields may have any type.
        properties = value if isinstance(value := self._parameters.get("properties"), dict) else {}
        required = value if isinstance(value := self._parameters.get("required"), list) else []
        names = [f"value{self._number}_{index}" for index in range(len(properties))]
        parts = [
            f'{name} "\\n"' if key in required else f'({name} "\\n")?'
            for name, key in zip(names, properties, strict=True)
        ]
        rules = [
            rule
            for name, (key, schema) in zip(names, properties.items(), strict=True)
            for rule in self._value(name, key, schema)
        ]
        if not properties and self._parameters and self._parameters.get("additionalProperties") is not False:
            parts, rules = [f'(value{self._number} "\\n")*'], self._any_value(f"value{self._number}")
        form, name = self._form, self._tool.function.name
        begin = self._quoted(f"{form.begin}{name}{form.name_end}\n")
        # DeepSeek-V3.2 writes an empty line for a call without parameters.
        empty = "" if required else ' "\\n"?'
        return [f"call{self._number}: {begin}{empty} {' '.join(parts)} {self._quoted(form.end)}", *rules]

    def _value(self, name: str, key: str, schema: Any) -> list[str]:
        """Return the rules of one parameter. name: of the rule; key, schema: the parameter's name and schema."""
        end = f"{self._line}{self._form.parameter_end}"
        schema = schema if isinstance(schema, dict) else {}
        is_text = self._form.is_text_schema(schema)
        begin = self._quoted(f"{self._form.parameter(key, is_text)}{self._line}")
        if is_text and (values := schema.get("enum") or ([schema["const"]] if "const" in schema else [])):
            texts = " | ".join(self._quoted(value) or _EMPTY for value in values)
            return [f"{name}: {begin} ({texts}) {self._quoted(end)}"]
        if is_text:
            return [f"{name}: {begin} {name}_text", f"{name}_text[suffix={_string(end)}]: /(?s:.*)/"]
        complete = _definitions(self._parameters) | schema
        return [f"{name}: {begin} {name}_json {self._quoted(end)}", f"{name}_json: {_json(complete)}"]

    def _any_value(self, name: str) -> list[str]:
        """Return the rules for a tool that does not declare its parameters: text values under any names."""
        before, _, after = self._form.parameter("\0", True).partition("\0")
        end = _string(f"{self._line}{self._form.parameter_end}")
        opening = f"{self._quoted(before)} {_ANY_NAME} {self._quoted(f'{after}{self._line}')}"
        return [f"{name}: {opening} {name}_text", f"{name}_text[suffix={end}]: /(?s:.*)/"]
