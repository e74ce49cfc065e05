"""Replies in harmony, the format of gpt-oss: messages with a channel, and a recipient for tool calls.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>arguments<|call|>

The channel `analysis` is reasoning; `final`, and `commentary` without a recipient, are content. Prompts are written by
the chat template of the checkpoint. The tags are special tokens, so the text must be decoded with them.
"""

import re
from typing import Protocol

from .call_forms import CallWriter, num_held
from .reply_parser import Parts

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
START, CONSTRAIN = "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
LAST = ("<|return|>", "<|call|>")  # the tokens that end a reply
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Tokens(Protocol):
    """A tokenizer that finds the ids of special tokens."""

    def token_id(self, token: str) -> int | None: ...


def is_harmony(tokenizer: Tokens) -> bool:
    """Return whether a model writes harmony: whether its tokenizer has the tags."""
    return all(tokenizer.token_id(tag) is not None for tag in (CHANNEL, MESSAGE, *ENDS))


def last_ids(tokenizer: Tokens) -> tuple[int, ...]:
    """Return the ids of the tokens that end a reply."""
    return tuple(i for tag in LAST if (i := tokenizer.token_id(tag)) is not None)


class HarmonyParser:
    """Parses a reply as it grows; the joined parts are the same however the text is split.

    may_think: False makes reasoning content. has_tools: False makes calls content. is_parallel: False drops all calls
    but the first. A reply without tags is content.
    """

    def __init__(self, *, may_think: bool, has_tools: bool, is_parallel: bool = True) -> None:
        self._may_think, self._has_tools = may_think, has_tools
        self._calls = CallWriter(is_parallel=is_parallel)
        self._text = ""
        self._is_header, self._is_first = True, True
        self._kind = "content"

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def add(self, text: str, *, is_last: bool = False) -> Parts:
        """Add text and return the new parts. is_last: there is no more text."""
        self._text += text
        parts = Parts()
        while self._read_header(is_last) if self._is_header else self._read_body(parts, is_last):
            pass
        parts.calls = self._calls.take()
        return parts

    def _read_header(self, is_last: bool) -> bool:
        """Read up to the tag before a message's text; return whether it is there."""
        if self._is_first:
            inner = self._text.lstrip()
            tags = (CHANNEL, START, MESSAGE)
            if not inner.startswith(tags) and (is_last or not any(tag.startswith(inner) for tag in tags)):
                self._is_header = self._is_first = False  # such as the text that a grammar forces
                return bool(self._text)
        header, tag, rest = self._text.partition(MESSAGE)
        if not tag:
            return False
        self._text, self._is_header, self._is_first = rest, False, False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header.partition(CONSTRAIN)[0])
        self._kind = "content"
        if recipient is not None and self._has_tools:
            self._kind = "call"
            self._calls.begin(recipient[1])
        elif channel is not None and channel[1] == "analysis" and self._may_think:
            self._kind = "reasoning"
        return True

    def _read_body(self, parts: Parts, is_last: bool) -> bool:
        """Read a message's text up to the tag after it; return whether that is there."""
        tags = (*ENDS, START)
        matches = [(at, tag) for tag in tags if (at := self._text.find(tag)) >= 0]
        if matches:
            at, tag = min(matches)
            text, self._text, self._is_header = self._text[:at], self._text[at + len(tag) :], True
        else:
            at = len(self._text) - (0 if is_last else num_held(self._text, tags))
            text, self._text = self._text[:at], self._text[at:]
        if self._kind == "call":
            self._calls.add(text)
        elif self._kind == "reasoning":
            parts.reasoning += text
        else:
            parts.content += text
        return bool(matches)
