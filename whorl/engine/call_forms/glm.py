"""Tool calls of GLM-4.5 and its successors: the name is bare text, and a parameter's name has a tag of its own."""

import re
from typing import Any

from .reader import ReadStatus
from .tagged import TaggedCalls

_NAME = re.compile(r'\s*([^\s<>{}"]+)(?:[ \t]*\n|(?=<))')
_MAY_BE_NAME = re.compile(r'\s*[^\s<>{}"]*[ \t]*')


class Glm4Calls(TaggedCalls):
    """Tool calls of GLM-4.5: `<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`; each call has its own tag.

    The markup does not tell the type of a value; the tool's schema does.
    """

    open, close = "<tool_call>", ""
    begin = name_end = ""
    end = "</tool_call>"
    parameter_begin, parameter_end = "<arg_key>", "</arg_value>"
    parameter_tag = re.compile(r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>")
    is_alone = True
    tags = (open,)
    marks = ("<arg_key>",)

    @classmethod
    def parameter(cls, name: str, is_text: bool) -> str:
        return f"<arg_key>{name}</arg_key>\n<arg_value>"

    def is_text(self, tag: re.Match[str], schema: Any) -> bool:
        return self.is_text_schema(schema)

    def _call(self, text: str, is_last: bool) -> tuple[int, ReadStatus | None]:
        """Read the name, which ends at a line break or before a tag."""
        if (match := _NAME.match(text)) is None:
            return 0, ReadStatus.MORE if _MAY_BE_NAME.fullmatch(text) else ReadStatus.BROKEN
        after = text[match.end() :].lstrip()
        tags = (self.parameter_begin, self.end)
        if not after.startswith(tags):  # until a tag follows, it may be text
            may_be = any(tag.startswith(after) for tag in tags)
            return 0, ReadStatus.MORE if may_be else ReadStatus.BROKEN
        self._name, self._has_parameters, self._step = match[1], False, self._parameter
        self.calls.begin(self._name)
        self.calls.add("{")
        return match.end(), None

    def _parameter(self, text: str, is_last: bool) -> tuple[int, ReadStatus | None]:
        inner = text.lstrip()
        if not inner.startswith(self.end):
            return super()._parameter(text, is_last)
        self.calls.add("}")
        return len(text) - len(inner) + len(self.end), ReadStatus.END

    def _neither(self, text: str, begin: str, end: str, is_last: bool) -> tuple[int, ReadStatus]:
        """Return the status of a text that is neither of two tags; a parameter's tag is a pair with a name inside."""
        inner = text.lstrip()
        may_be = any(tag.startswith(inner) for tag in (begin, self.end)) or _may_be_pair(inner)
        if may_be and is_last and self._name:
            return len(text), ReadStatus.END  # the reply ends inside of a tag
        return 0, ReadStatus.MORE if may_be else ReadStatus.BROKEN


_PAIR = re.compile(r"<arg_key>[^<\n]*(?:(</arg_key>)\s*)?")


def _may_be_pair(text: str) -> bool:
    """Return whether the text may be the beginning of the two tags around and after a parameter's name."""
    if (match := _PAIR.match(text)) is None:
        return False
    return ("<arg_value>" if match[1] else "</arg_key>").startswith(text[match.end() :])
