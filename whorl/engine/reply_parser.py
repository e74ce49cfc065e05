"""What is inside a reply: thinking between <think> tags, tool calls in the Hermes form, and the rest.

A call is `<tool_call>`, a JSON object with name and arguments, `</tool_call>`.
"""

import json
import uuid
from dataclasses import dataclass, field

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(slots=True)
class Parts:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


class ReplyParser:
    """Takes a reply apart as it grows; what comes out joins to the same, however the text is cut.

    may_think: the model knows the think tags. is_thinking: the prompt has opened one. White space next to a tag is
    dropped. A call that is not valid JSON, or that never ends, is content.
    """

    def __init__(self, *, may_think: bool, is_thinking: bool, has_tools: bool, is_parallel: bool = True) -> None:
        self._state = "thinking" if is_thinking else "start" if may_think else "content"
        self._has_tools, self._is_parallel = has_tools, is_parallel
        self._text = ""
        self._is_after_tag = is_thinking
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool = False) -> Parts:
        self._text += text
        parts = Parts()
        while self._advance(parts, is_last):
            pass
        return parts

    def _advance(self, parts: Parts, is_last: bool) -> bool:
        """Whether there may be more to do with the text at hand."""
        if self._state == "start":
            return self._start(is_last)
        if self._state == "thinking":
            text, is_whole = self._until(END_THINK, is_last)
            parts.reasoning += text
            return self._enter("content") if is_whole else False
        if self._state == "call":
            return self._call(parts, is_last)
        text, is_whole = self._until(CALL if self._has_tools else None, is_last)
        parts.content += text
        return self._enter("call") if is_whole else False

    def _enter(self, state: str) -> bool:
        self._state, self._is_after_tag = state, True
        return True

    def _start(self, is_last: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text = text[len(THINK) :]
            return self._enter("thinking")
        if THINK.startswith(text) and not is_last:
            return False
        self._state = "content"
        return True

    def _until(self, tag: str | None, is_last: bool) -> tuple[str, bool]:
        """The text that is certain to come before the tag, and whether the tag was there."""
        if self._is_after_tag:
            self._text = self._text.lstrip()
            self._is_after_tag = not self._text
        at = self._text.find(tag) if tag else -1
        if at >= 0:
            assert tag is not None
            text, self._text = self._text[:at].rstrip(), self._text[at + len(tag) :]
            return text, True
        num_held = 0 if is_last or tag is None else _num_held(self._text, tag)
        end = len(self._text) - num_held
        text, self._text = self._text[:end], self._text[end:]
        return text, False

    def _call(self, parts: Parts, is_last: bool) -> bool:
        body, end, rest = self._text.partition(END_CALL)
        if not end and not is_last:
            return False
        call = _parse(body) if end else None
        if call is None:
            parts.content += f"{CALL}{body}{end}"
        elif self._is_parallel or not self.num_calls:
            parts.calls.append(call)
            self.num_calls += 1
        self._text = rest
        return self._enter("content")


def _num_held(text: str, tag: str) -> int:
    """Length of the end of the text that may belong to the tag, with the white space before it."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    size = next((n for n in sizes if tag.startswith(text[-n:])), 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())


def _parse(body: str) -> Call | None:
    try:
        found = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(found["name"], arguments)
