"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

from .json_calls import JsonCalls


class HermesCalls(JsonCalls):
    begin, end = "<tool_call>\n", "</tool_call>"
    tags = ("<tool_call>",)
    marks = ("<tool_call>",)
