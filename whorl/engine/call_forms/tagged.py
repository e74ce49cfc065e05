"""Tool calls whose parameters are tags around values."""

import json
import re
from abc import abstractmethod
from typing import Any, ClassVar

from whorl.engine.deepseek_v32_prompt import DSML

from .reader import CallReader, CallWriter, ReadStatus, Schemas, num_held


class TaggedCalls(CallReader):
    """Reads tagged calls. open, close: the tags around a section of calls. begin, name_end: before and after a call's
    name; end: after its parameters.

    A string value is output as it comes. Any other value is output when complete: unchanged if it is JSON, else as a
    string. has_lines: a line break after a parameter's tag, and one before its end tag, are not part of the value.
    is_alone: each call has a separate section. before: what the model writes before its first call.
    """

    open: ClassVar[str]
    close: ClassVar[str]
    begin: ClassVar[str]
    name_end: ClassVar[str]
    end: ClassVar[str]
    parameter_begin: ClassVar[str]
    parameter_tag: ClassVar[re.Pattern[str]]  # all of the opening tag; its first group is the name
    parameter_end: ClassVar[str]
    has_lines: ClassVar[bool] = False
    is_alone: ClassVar[bool] = False
    before: ClassVar[str] = ""

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        super().__init__(calls, schemas)
        self._call_tag = re.compile(f'{re.escape(self.begin)}([^">\n]+){re.escape(self.name_end)}')
        self._step, self._name = self._call, ""  # the name of the current or the latest call
        self._has_parameters = self._is_text = self._is_first = False

    @classmethod
    @abstractmethod
    def parameter(cls, name: str, is_text: bool) -> str:
        """Return the tag that opens a parameter."""

    @abstractmethod
    def is_text(self, tag: re.Match[str], schema: Any) -> bool:
        """Return whether a parameter's value is a string. schema: the parameter's; None if unknown."""

    @staticmethod
    def is_text_schema(schema: Any) -> bool:
        """Return whether values of a schema are strings; without a schema they are."""
        if not isinstance(schema, dict):
            return True
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return isinstance(values, list) and all(isinstance(value, str) for value in values)
        return schema.get("type", "string") == "string" and not {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys()

    def value(self, text: str) -> str:
        """Return the JSON of a value that is not a string."""
        return text if _is_json(text) else _json(text)

    def read(self, text: str, *, is_last: bool) -> tuple[int, ReadStatus]:
        done = 0
        while True:
            size, status = self._step(text[done:], is_last)
            done += size
            if status is not None:
                return done, status

    def _call(self, text: str, is_last: bool) -> tuple[int, ReadStatus | None]:
        """Read the tag that begins a call, or the one that closes the section. As all steps, return how many characters
        are consumed and the status; None: go on with the next step."""
        inner = text.lstrip()
        skipped = len(text) - len(inner)
        if inner.startswith(self.close) and self._name:  # a section without a call is text
            return skipped + len(self.close), ReadStatus.END
        if (tag := self._call_tag.match(inner)) is None:
            return self._neither(text, self.begin, self.close, is_last)
        self._name, self._has_parameters, self._step = tag[1], False, self._parameter
        self.calls.begin(self._name)
        self.calls.add("{")
        return skipped + tag.end(), None

    def _parameter(self, text: str, is_last: bool) -> tuple[int, ReadStatus | None]:
        """Read the tag that opens a parameter, or the one that ends the call."""
        inner = text.lstrip()
        skipped = len(text) - len(inner)
        if inner.startswith(self.end):
            self.calls.add("}")
            self._step = self._call
            return skipped + len(self.end), None
        if (tag := self.parameter_tag.match(inner)) is None:
            return self._neither(text, self.parameter_begin, self.end, is_last)
        schemas = (self.schemas.get(self._name) or {}).get("properties") or {}
        self._is_text = self.is_text(tag, schemas.get(tag[1]) if isinstance(schemas, dict) else None)
        comma, quote = ", " if self._has_parameters else "", '"' if self._is_text else ""
        self.calls.add(f"{comma}{_json(tag[1])}: {quote}")
        self._has_parameters, self._is_first, self._step = True, True, self._value
        return skipped + tag.end(), None

    def _neither(self, text: str, begin: str, end: str, is_last: bool) -> tuple[int, ReadStatus]:
        """Return the status of a text that is neither of two tags: more of it may make one, or it is broken."""
        inner = text.lstrip()
        may_be = any(tag.startswith(inner) for tag in (begin, end)) or (inner.startswith(begin) and ">" not in inner)
        if may_be and is_last and self._name:
            return len(text), ReadStatus.END  # the reply ends inside of a tag
        return 0, ReadStatus.MORE if may_be else ReadStatus.BROKEN

    def _value(self, text: str, is_last: bool) -> tuple[int, ReadStatus | None]:
        """Read a parameter's value and its end tag; the part of a string that is certain is output at once."""
        start = int(self.has_lines and self._is_first and text.startswith("\n"))
        if (at := text.find(self.parameter_end, start)) >= 0:
            value = text[start:at].removesuffix("\n") if self.has_lines else text[start:at]
            self.calls.add(f'{_json(value)[1:-1]}"' if self._is_text else self.value(value))
            self._step = self._parameter
            return at + len(self.parameter_end), None
        if is_last:  # a truncated value stays invalid JSON, so that nobody takes it for complete
            self.calls.add(_json(text[start:])[1:-1] if self._is_text else text[start:])
            return len(text), ReadStatus.END
        if not self._is_text:
            return 0, ReadStatus.MORE
        tags = (self.parameter_end, f"\n{self.parameter_end}") if self.has_lines else (self.parameter_end,)
        end = max(start, len(text) - num_held(text, tags))
        self.calls.add(_json(text[start:end])[1:-1])
        self._is_first = self._is_first and end == 0
        return end, ReadStatus.MORE


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


class DeepSeekV32Calls(TaggedCalls):
    """Tool calls of DeepSeek-V3.2: a block of invocations, whose parameters say whether they are strings."""

    open, close = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
    begin, name_end, end = f'<{DSML}invoke name="', '">', f"</{DSML}invoke>"
    parameter_begin, parameter_end = f'<{DSML}parameter name="', f"</{DSML}parameter>"
    parameter_tag = re.compile(f'{parameter_begin}([^">\n]+)" string="(true|false)">')
    before = "\n\n"
    tags = (open,)
    marks = (DSML,)

    @classmethod
    def parameter(cls, name: str, is_text: bool) -> str:
        return f'{cls.parameter_begin}{name}" string="{"true" if is_text else "false"}">'

    def is_text(self, tag: re.Match[str], schema: Any) -> bool:
        return tag[2] == "true"


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as the model's template writes them


class Qwen3CoderCalls(TaggedCalls):
    """Tool calls of Qwen3-Coder: `<function=name>` with `<parameter=name>` inside, each value on separate lines.

    The markup does not tell the type of a value; the tool's schema does.
    """

    open, close = "<tool_call>", "</tool_call>"
    begin, name_end, end = "<function=", ">", "</function>"
    parameter_begin, parameter_end = "<parameter=", "</parameter>"
    parameter_tag = re.compile(r'<parameter=([^">\n]+)>')
    has_lines = is_alone = True
    tags = (open,)
    marks = ("<function=",)

    @classmethod
    def parameter(cls, name: str, is_text: bool) -> str:
        return f"{cls.parameter_begin}{name}>"

    def is_text(self, tag: re.Match[str], schema: Any) -> bool:
        return self.is_text_schema(schema)

    def value(self, text: str) -> str:
        return super().value(_PYTHON.get(text.strip(), text))
