"""Calls whose parameters are tags around values."""

import json
import re
from abc import abstractmethod
from typing import Any, ClassVar

from .reader import CallReader, CallWriter, Found, Schemas, num_held


class TaggedCalls(CallReader):
    """open, close: around a stretch of calls. begin, name_end, end: around a call's name, and behind its parameters.

    A value that is a text goes on as it comes. Any other goes on when it is whole: as it is if it is JSON, else as a
    text. has_lines: a line break behind a parameter's tag, and one before its end, are not of the value. is_alone: each
    call has a stretch of its own. before: what the model writes in front of its first call.
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
        self._step, self._name = self._call, ""  # of the call in progress, or the latest
        self._has_parameters = self._is_text = self._is_first = False

    @classmethod
    @abstractmethod
    def parameter(cls, name: str, is_text: bool) -> str:
        """The tag that opens a parameter."""

    @abstractmethod
    def is_text(self, tag: re.Match[str], schema: Any) -> bool:
        """Whether a parameter's value is a text. schema: its own; None: not known."""

    @staticmethod
    def is_text_schema(schema: Any) -> bool:
        """Whether values of a schema are texts; what is not described is one."""
        if not isinstance(schema, dict):
            return True
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return isinstance(values, list) and all(isinstance(value, str) for value in values)
        return schema.get("type", "string") == "string" and not {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys()

    def value(self, text: str) -> str:
        """The JSON of a value that is no text."""
        return text if _is_json(text) else _json(text)

    def read(self, text: str, *, is_last: bool) -> tuple[int, Found]:
        done = 0
        while True:
            size, found = self._step(text[done:], is_last)
            done += size
            if found is not None:
                return done, found

    def _call(self, text: str, is_last: bool) -> tuple[int, Found | None]:
        inner = text.lstrip()
        skipped = len(text) - len(inner)
        if inner.startswith(self.close) and self._name:  # a stretch without a call is text
            return skipped + len(self.close), Found.END
        if (tag := self._call_tag.match(inner)) is None:
            return self._neither(text, self.begin, self.close, is_last)
        self._name, self._has_parameters, self._step = tag[1], False, self._parameter
        self.calls.begin(self._name)
        self.calls.add("{")
        return skipped + tag.end(), None

    def _parameter(self, text: str, is_last: bool) -> tuple[int, Found | None]:
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

    def _neither(self, text: str, begin: str, end: str, is_last: bool) -> tuple[int, Found]:
        """Of a text that is neither of two tags: it may become one, or never will."""
        inner = text.lstrip()
        may_be = any(tag.startswith(inner) for tag in (begin, end)) or (inner.startswith(begin) and ">" not in inner)
        if may_be and is_last and self._name:
            return len(text), Found.END  # the reply ends inside of a tag
        return 0, Found.MORE if may_be else Found.BROKEN

    def _value(self, text: str, is_last: bool) -> tuple[int, Found | None]:
        start = int(self.has_lines and self._is_first and text.startswith("\n"))
        if (at := text.find(self.parameter_end, start)) >= 0:
            value = text[start:at].removesuffix("\n") if self.has_lines else text[start:at]
            self.calls.add(f'{_json(value)[1:-1]}"' if self._is_text else self.value(value))
            self._step = self._parameter
            return at + len(self.parameter_end), None
        if is_last:  # what is cut off stays so: nobody may take it for the whole value
            self.calls.add(_json(text[start:])[1:-1] if self._is_text else text[start:])
            return len(text), Found.END
        if not self._is_text:
            return 0, Found.MORE
        tags = (self.parameter_end, f"\n{self.parameter_end}") if self.has_lines else (self.parameter_end,)
        end = max(start, len(text) - num_held(text, tags))
        self.calls.add(_json(text[start:end])[1:-1])
        self._is_first = self._is_first and end == 0
        return end, Found.MORE


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
