"""Slots in which work runs on threads: clients take turns, and what a client that left has begun is ended.

One client has all slots but one at most, so that another's work begins at once. Used on one event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from whorl.engine.fair_queue import FairQueue, has_room

from .engine_thread import EngineError, QueueFull
from .running import CURRENT_CLIENT

_KILL_SECONDS = 1.0  # work of a client that left may take this long: a new process takes about as long to start
_RETRY_SECONDS = 0.2
_SPARE_SECONDS = 0.5  # once all others have been in use for this long, the last one is started


class Resource(Protocol):
    """What the work in a slot uses alone, such as a process."""

    def start(self) -> None:
        """Make it ready before it is needed."""

    def interrupt(self) -> None:
        """Let the call in progress end with an error; without one, do nothing. From any thread."""


class Nothing:
    """Of a slot whose work needs a thread only; it is not interrupted."""

    def start(self) -> None:
        pass

    def interrupt(self) -> None:
        pass


_R = TypeVar("_R", bound=Resource)
_T = TypeVar("_T")


@dataclass(eq=False)
class Slot(Generic[_R]):
    """A client's place in the queue. since, resource: once it is granted; work: once something runs in it."""

    client: str | None
    granted: "asyncio.Future[None]"
    threads: ThreadPoolExecutor
    priority: int = 0
    since: float | None = None
    resource: _R | None = None
    work: "Future[Any] | None" = None

    async def run(self, work: Callable[[_R], _T]) -> _T:
        """Run a function with the resource on a thread."""
        try:
            assert self.resource is not None
            self.work = self.threads.submit(work, self.resource)
        except RuntimeError:
            raise EngineError("the server is shutting down") from None
        try:
            return await asyncio.wrap_future(self.work)
        finally:
            if self.work.done():
                self.work = None  # its error has this frame, and so the data, which a cycle would keep


class FairSlots(Generic[_R]):
    """Grants as many slots as there are resources. kind: of the work. max_queue: how many may wait, see `has_room`;
    None: any number."""

    def __init__(self, kind: str, resources: Sequence[_R], *, max_queue: int | None = None) -> None:
        self._kind, self._max_queue, self._most = kind, max_queue, max(1, len(resources) - 1)
        self._free = list(resources)[::-1]  # the one used last is taken first, as it is warm
        self._threads = ThreadPoolExecutor(len(resources), thread_name_prefix=f"whorl-{kind}")
        self._queue: FairQueue[Slot[_R]] = FairQueue()
        self._is_closed = False

    def close(self) -> None:
        """Refuse what waits. What runs ends when its resource is closed."""
        self._is_closed = True
        for slot in self._queue:
            if not slot.granted.done():
                slot.granted.set_exception(EngineError("the server is shutting down"))
        self._threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot[_R]]:
        """Wait for a slot and hold it. If its work is left unfinished, it is interrupted, and the slot held so long.

        Raises QueueFull when too many wait, and EngineError during the shutdown.
        """
        if self._is_closed:
            raise EngineError("the server is shutting down")
        slot: Slot[_R] = Slot(CURRENT_CLIENT.get(), asyncio.get_running_loop().create_future(), self._threads)
        num_waiting = {client: len(line) for client, line in self._queue.lines.items()}
        if self._max_queue is not None and not has_room(num_waiting, slot.client, 1, self._max_queue):
            raise QueueFull(f"{len(self._queue)} requests wait for a {self._kind} worker already")
        self._queue.add(slot)
        self._grant()
        try:
            await slot.granted
            yield slot
        finally:
            self._leave(slot)

    def _grant(self) -> None:
        """Grant the free slots to those whose turn it is."""
        loop = asyncio.get_running_loop()
        while self._free and (slot := self._queue.next(most=self._most)) is not None:
            self._queue.start(slot)
            slot.since, slot.resource = loop.time(), self._free.pop()
            if not slot.granted.done():  # it was cancelled, or the server shuts down
                slot.granted.set_result(None)
            if len(self._free) == 1:
                loop.call_later(_SPARE_SECONDS, self._start_spare)

    def _start_spare(self) -> None:
        if len(self._free) == 1 and not self._is_closed:
            self._threads.submit(self._free[0].start)

    def _leave(self, slot: Slot[_R]) -> None:
        loop = asyncio.get_running_loop()
        if slot.since is None:
            self._queue.remove(slot)
        elif slot.work is None or slot.work.done():
            self._release(slot)
        else:
            slot.work.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._release, slot))
            loop.call_later(max(0.0, slot.since + _KILL_SECONDS - loop.time()), self._interrupt, slot)

    def _release(self, slot: Slot[_R]) -> None:
        assert slot.since is not None
        assert slot.resource is not None
        self._queue.stop(slot)
        self._queue.charge(slot.client, asyncio.get_running_loop().time() - slot.since)
        self._free.append(slot.resource)
        self._grant()

    def _interrupt(self, slot: Slot[_R]) -> None:
        """End what runs in a slot. It may be between two calls of its resource, so this is tried until it has ended."""
        assert slot.work is not None
        assert slot.resource is not None
        if not slot.work.done():
            slot.resource.interrupt()
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._interrupt, slot)
