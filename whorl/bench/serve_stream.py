"""From the bytes of a streamed answer to pieces with moments and tokens. Nothing here waits for anything."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from whorl.bench.serve_record import Record

DONE = "[DONE]"
# How tokens of a piece are counted, the best first.
RUNNING, SPREAD, PIECES = "running usage", "final usage, spread by text", "one a piece"


class EventReader:
    """Server-sent events of bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of each event that is whole now; comments and other fields are none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event.decode()


@dataclass(frozen=True, slots=True)
class Arrival:
    """num_chars: of its text. total: of the answer's tokens so far, where the server says it."""

    at: float
    num_chars: int
    total: int | None


class Answer:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.pieces: list[Arrival] = []
        self.usage: dict[str, Any] = {}
        self.is_done = False
        self.error: str | None = None

    def take(self, now: float, event: str) -> None:
        """One event. ValueError, KeyError, TypeError or AttributeError: it is not OpenAI's."""
        if event == DONE:
            self.is_done = True
            return
        chunk = json.loads(event)
        if chunk.get("error"):
            error = chunk["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        self.usage = chunk.get("usage") or self.usage
        if choices := chunk.get("choices"):
            total = (chunk.get("usage") or {}).get("completion_tokens")
            self.pieces.append(Arrival(now, sum(_num_chars(choice) for choice in choices), total))
            self.is_done = self.is_done or any(choice.get("finish_reason") for choice in choices)

    def count(self, record: Record) -> None:
        """Put tokens and their moments into the record, and why it failed where it did."""
        total = self.usage.get("completion_tokens")
        if any(piece.total is not None for piece in self.pieces):
            record.counted, record.arrivals = RUNNING, _running(self.pieces, total)
        elif total is not None:
            record.counted, record.arrivals = SPREAD, _spread([p for p in self.pieces if p.num_chars], total)
        else:
            record.counted = PIECES
            record.arrivals = [(piece.at, 1) for piece in self.pieces if piece.num_chars]
        record.num_output = sum(count for _, count in record.arrivals)
        record.num_input = self.usage.get("prompt_tokens") or record.asked_input
        record.num_cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if self.error is not None:
            record.failure, record.message = "error in the stream", self.error
        elif not self.is_done:
            record.failure, record.message = "ended early", "the stream ended without a finish_reason or [DONE]"
        elif not record.arrivals:
            record.failure, record.message = "no tokens", "the stream brought no token"


def _num_chars(choice: dict[str, Any]) -> int:
    """Of text, thought or calls; the chunk that opens a chat has none."""
    delta = choice.get("delta") or {}
    texts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
    calls = sum(len(json.dumps(call)) for call in delta.get("tool_calls") or ())
    return sum(len(text) for text in texts if text) + calls


def _running(pieces: list[Arrival], total: int | None) -> list[tuple[float, int]]:
    """By what each piece's usage adds. What only the last usage has, the last piece brought."""
    found: list[tuple[float, int]] = []
    seen = 0
    for piece in pieces:
        if piece.total is not None and piece.total > seen:
            found.append((piece.at, piece.total - seen))
            seen = piece.total
    if total is not None and total > seen:
        at, count = found.pop() if found else (pieces[-1].at, 0)
        found.append((at, count + total - seen))
    return found


def _spread(pieces: list[Arrival], total: int) -> list[tuple[float, int]]:
    """The answer's tokens over its pieces: one each, where there are enough, the rest by the length of the texts."""
    each = 1 if total >= len(pieces) else 0
    chars, rest = sum(piece.num_chars for piece in pieces), total - each * len(pieces)
    found, seen, given = [], 0, 0
    for number, piece in enumerate(pieces, 1):
        seen += piece.num_chars
        until = max(1, each * number + round(rest * seen / chars))
        if until > given:
            found.append((piece.at, until - given))
        given = until
    return found
