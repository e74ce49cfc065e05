"""Tool calls of Qwen3-Coder: `<function=name>` with `<parameter=name>` inside, each value on separate lines.

The markup does not tell the type of a value; the tool's schema does.
"""

import re
from typing import Any

from .tagged import TaggedCalls

_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as the model's template writes them


class Qwen3CoderCalls(TaggedCalls):
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
