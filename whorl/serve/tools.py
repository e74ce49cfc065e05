"""Tool calls that must come: the grammar that forces one."""

import json
from collections.abc import Sequence
from typing import Any

from whorl.engine.reply_parser import CALL, END_CALL

from .json_layout import json_layout
from .schema_parts import NamedTool, Tool


def call_grammar(tools: Sequence[Tool], choice: NamedTool | str, *, is_parallel: bool, has_tokens: bool) -> str:
    """A grammar, in llguidance's Lark, of which every sentence is a call of one of the tools.

    has_tokens: the tags are tokens of their own; such a token has no text that a quoted string would match.
    """
    chosen = [t for t in tools if isinstance(choice, str) or t.function.name == choice.function.name]
    calls: dict[str, Any] = {"anyOf": [_call_schema(tool) for tool in chosen]}
    calls["x-guidance"] = json_layout(calls)
    more = r' ("\n" call)*' if is_parallel and isinstance(choice, str) else ""
    begin, end = (CALL, END_CALL) if has_tokens else (f'"{CALL}"', f'"{END_CALL}"')
    return f'start: call{more}\ncall: {begin} "\\n" body "\\n" {end}\nbody: %json {json.dumps(calls)}\n'


def _call_schema(tool: Tool) -> dict[str, Any]:
    arguments = tool.function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
