"""Parses the bytes of a streamed response into pieces with times and token counts. It does no I/O."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from whorl.bench.serve_record import Record

DONE = "[DONE]"
# How the tokens of a piece are counted, the best method first.
RUNNING, SPREAD, PIECES = "running usage", "final usage, spread by text", "one a piece"


class EventReader:
    """Reads server-sent events from bytes that may be split anywhere."""

    def __init__(self) -> None:
        self._incomplete = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the data of each event that is complete now; comments and other fields are ignored."""
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event.decode()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece of the response.

    at: when it arrived; num_chars: length of its text; total: tokens of the response so far, None where the server does
    not report it.
    """

    at: float
    num_chars: int
    total: int | None


class Answer:
    """The response to one request as far as it has arrived."""

    def __init__(self) -> None:
        self.pieces: list[Arrival] = []
        self.usage: dict[str, Any] = {}
        self.is_done = False
        self.error: str | None = None

    def take(self, now: float, event: str) -> None:
        """Add one event. Raises ValueError, KeyError, TypeError or AttributeError when it is not of the OpenAI API."""
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
        """Write the tokens and their times into the record, and the failure if there is one."""
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
            record.failure, record.message = "no tokens", "the stream had no token"


def _num_chars(choice: dict[str, Any]) -> int:
    """Return the length of text, reasoning and tool calls; the chunk that opens a chat has none."""
    delta = choice.get("delta") or {}
    texts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
    calls = sum(len(json.dumps(call)) for call in delta.get("tool_calls") or ())
    return sum(len(text) for text in texts if text) + calls


def _running(pieces: list[Arrival], total: int | None) -> list[tuple[float, int]]:
    """Count tokens by what the usage of each piece adds; tokens only in the final usage go to the last piece."""
    arrivals: list[tuple[float, int]] = []
    seen = 0
    for piece in pieces:
        if piece.total is not None and piece.total > seen:
            arrivals.append((piece.at, piece.total - seen))
            seen = piece.total
    if total is not None and total > seen:
        at, count = arrivals.pop() if arrivals else (pieces[-1].at, 0)
        arrivals.append((at, count + total - seen))
    return arrivals


def _spread(pieces: list[Arrival], total: int) -> list[tuple[float, int]]:
    """Spread the tokens over the pieces: one for each where there are enough, the others by length of text."""
    per_piece = 1 if total >= len(pieces) else 0
    chars, remaining = sum(piece.num_chars for piece in pieces), total - per_piece * len(pieces)
    arrivals, seen, assigned = [], 0, 0
    for number, piece in enumerate(pieces, 1):
        seen += piece.num_chars
        until = max(1, per_piece * number + round(remaining * seen / chars))
        if until > assigned:
            arrivals.append((piece.at, until - assigned))
        assigned = until
    return arrivals
