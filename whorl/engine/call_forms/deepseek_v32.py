"""Tool calls of DeepSeek-V3.2: a block of invocations, whose parameters say whether they are strings."""

import re
from typing import Any

from whorl.engine.deepseek_v32_prompt import DSML

from .tagged import TaggedCalls


class DeepSeekV32Calls(TaggedCalls):
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
