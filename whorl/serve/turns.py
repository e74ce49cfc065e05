"""Formats a reply as a list of sections, which `/v1/responses` calls items and `/v1/messages` calls blocks.

Each section is opened, extended and closed before the next one, and a stream sends an event for each of these. The
complete response is assembled from the same sections, so that the two cannot differ.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from whorl.engine.call_forms import CallPart

from .engine_thread import StepOutput
from .replies import ParsedReply, Run
from .schemas import ChatRequest

Event = dict[str, Any]


class Kind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Section:
    """Reasoning, text or one tool call. text: of a tool call, its arguments as the model wrote them."""

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_closed: bool = False


class TurnReply(ParsedReply):
    """The reply to a request with one choice.

    finish_reason: None until the sequence is finished. stop_string: the stop string that ended it.
    """

    def __init__(self, request: ChatRequest, run: Run) -> None:
        super().__init__(request, run)
        self.sections: list[Section] = []
        self.finish_reason: str | None = None

    @property
    def stop_string(self) -> str | None:
        return self.job.sequences[0].text.match

    async def complete(self, deadline: float) -> dict[str, Any]:
        async for output in self.job.outputs(deadline):
            for _ in self._events(output):
                pass
        return self.result()

    async def chunks(self, deadline: float) -> AsyncIterator[Event]:
        for event in self.begin_events():
            yield event
        async for output in self.job.outputs(deadline):
            for event in self._events(output):
                yield event
        for event in self.end_events():
            yield event

    def _events(self, output: StepOutput) -> Iterator[Event]:
        """Add one step output to the sections; yield the events for it."""
        parts = self.parse(output)
        if parts.reasoning:
            yield from self._extend(Kind.REASONING, parts.reasoning)
        if parts.content:
            yield from self._extend(Kind.TEXT, parts.content)
        for part in parts.calls:
            yield from self._call(part)
        if output.finish_reason is not None:
            self.finish_reason = self.reason(output)
            yield from self._close()

    def _extend(self, kind: Kind, text: str) -> Iterator[Event]:
        """Add text to the open section if it is of this kind, else to a new one."""
        if not self.sections or self.sections[-1].is_closed or self.sections[-1].kind != kind:
            yield from self._open(Section(kind, len(self.sections)))
        yield from self._add(text)

    def _call(self, part: CallPart) -> Iterator[Event]:
        """Add a part of a tool call; its first part opens a new section."""
        if part.id is not None and part.name is not None:
            yield from self._open(Section(Kind.CALL, len(self.sections), call_id=part.id, name=part.name))
        if part.arguments:
            yield from self._add(part.arguments)

    def _open(self, section: Section) -> Iterator[Event]:
        """Close the last section and open a new one."""
        yield from self._close()
        self.sections.append(section)
        yield from self.open_events(section)

    def _add(self, text: str) -> Iterator[Event]:
        """Add text to the last section; log-probabilities are reported for text only."""
        section = self.sections[-1]
        logprobs = self.take_logprobs(0)
        new_logprobs = logprobs["content"] if logprobs is not None and section.kind is Kind.TEXT else []
        section.logprobs += new_logprobs
        section.text += text
        yield from self.text_events(section, text, new_logprobs)

    def _close(self) -> Iterator[Event]:
        if self.sections and not self.sections[-1].is_closed:
            self.sections[-1].is_closed = True
            yield from self.close_events(self.sections[-1])

    # ---- for each interface to implement

    def begin_events(self) -> Iterator[Event]:
        """Yield the events that start a stream."""
        raise NotImplementedError

    def open_events(self, section: Section) -> Iterator[Event]:
        """Yield the events for a new section."""
        raise NotImplementedError

    def text_events(self, section: Section, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the events for text that was added to a section."""
        raise NotImplementedError

    def close_events(self, section: Section) -> Iterator[Event]:
        """Yield the events for a section that is complete."""
        raise NotImplementedError

    def end_events(self) -> Iterator[Event]:
        """Yield the events that end a stream."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Return the response with all sections so far."""
        raise NotImplementedError
