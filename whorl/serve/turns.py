"""An answer as a list of sections: what `/v1/responses` calls items and `/v1/messages` calls blocks.

Each section is opened, grows and is closed before the next; a stream says so event by event. The whole answer is made
of the same sections, so that the two cannot differ.
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
    """text: of a call, its arguments as the model wrote them."""

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_closed: bool = False


class TurnReply(ParsedReply):
    """Of a request for one answer. `finished`: the reason, once there is one; `stop`: the stop string that was met."""

    def __init__(self, request: ChatRequest, run: Run) -> None:
        super().__init__(request, run)
        self.sections: list[Section] = []
        self.finished: str | None = None

    @property
    def stop(self) -> str | None:
        return self.job.sequences[0].text.match

    async def whole(self, deadline: float) -> dict[str, Any]:
        async for output in self.job.outputs(deadline):
            for _ in self._events(output):
                pass
        return self.result()

    async def chunks(self, deadline: float) -> AsyncIterator[Event]:
        for event in self.begin():
            yield event
        async for output in self.job.outputs(deadline):
            for event in self._events(output):
                yield event
        for event in self.end():
            yield event

    def _events(self, output: StepOutput) -> Iterator[Event]:
        parts = self.parse(output)
        if parts.reasoning:
            yield from self._grow(Kind.REASONING, parts.reasoning)
        if parts.content:
            yield from self._grow(Kind.TEXT, parts.content)
        for part in parts.calls:
            yield from self._call(part)
        if output.finish_reason is not None:
            self.finished = self.reason(output)
            yield from self._close()

    def _grow(self, kind: Kind, text: str) -> Iterator[Event]:
        if not self.sections or self.sections[-1].is_closed or self.sections[-1].kind != kind:
            yield from self._open(Section(kind, len(self.sections)))
        yield from self._add(text)

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.id is not None and part.name is not None:
            yield from self._open(Section(Kind.CALL, len(self.sections), call_id=part.id, name=part.name))
        if part.arguments:
            yield from self._add(part.arguments)

    def _open(self, section: Section) -> Iterator[Event]:
        yield from self._close()
        self.sections.append(section)
        yield from self.opened(section)

    def _add(self, text: str) -> Iterator[Event]:
        section = self.sections[-1]
        logprobs = self.take_logprobs(0)
        new = logprobs["content"] if logprobs is not None and section.kind is Kind.TEXT else []
        section.logprobs += new
        section.text += text
        yield from self.added(section, text, new)

    def _close(self) -> Iterator[Event]:
        if self.sections and not self.sections[-1].is_closed:
            self.sections[-1].is_closed = True
            yield from self.closed(self.sections[-1])

    # ---- what the dialects say

    def begin(self) -> Iterator[Event]:
        raise NotImplementedError

    def opened(self, section: Section) -> Iterator[Event]:
        raise NotImplementedError

    def added(self, section: Section, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        raise NotImplementedError

    def closed(self, section: Section) -> Iterator[Event]:
        raise NotImplementedError

    def end(self) -> Iterator[Event]:
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """The whole answer, of what there is."""
        raise NotImplementedError
