"""Streams of an accelerator and their events, and why an engine uses one stream for everything.

As soon as a process has launched 8 kernels on a second stream, an H200 starts every kernel of a recorded graph later,
whichever stream it is replayed on: a decode step of Qwen3-0.6B takes 735 us instead of 698. torch cannot record graphs
on the default stream and launches two kernels on another one for each, so that four graphs are enough. Commands that
run an engine of one rank therefore call `leave_default_stream` first: then everything, recording included, runs on one
stream.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from whorl.device import NO_GRAPHS, accelerator, default_device, require, synchronize

_streams: dict[str, Any] = {}  # by device: the one that commands run on


def leave_default_stream(device: str | None) -> None:
    """Make one stream per process the current one of this thread, before it launches anything. None: the best device.

    Work that other threads or libraries launch on the default stream is not ordered with it. Has no effect on a device
    without graphs.
    """
    device = require(device or default_device())
    module = accelerator(device)
    if module is None or device in NO_GRAPHS:
        return
    if device not in _streams:
        synchronize(device)  # what was launched before
        _streams[device] = module.Stream()
    module.set_stream(_streams[device])


def carried_over() -> Callable[[], None]:
    """Return a function that lets the thread that calls it go on with this thread's stream, if it left the default."""
    left = [(module, stream) for device, stream in _streams.items() if (module := accelerator(device)) is not None]
    current = [(module, stream) for module, stream in left if module.current_stream() == stream]

    def use() -> None:
        for module, stream in current:
            module.set_stream(stream)

    return use


def event(device: str) -> Callable[[], None]:
    """Record an event in the current stream; the returned function waits until all work launched before it is done."""
    module = accelerator(device)
    if module is None:
        return lambda: None
    mark = module.Event()
    mark.record()
    return mark.synchronize


class FinishedEvent:
    """An event of work that has already finished."""

    def synchronize(self) -> None: ...


class Stream:
    """A stream of an accelerator, whose work runs in order. On the CPU `run` does the work before it returns.

    beside: True makes a new stream, which runs concurrently with others; False uses the caller's current stream.
    """

    def __init__(self, device: str, *, beside: bool = True) -> None:
        self.module = accelerator(device)
        self.stream = self.module.Stream() if self.module is not None and beside else None

    def run(self, work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        """Launch `work` after the events of other streams; returns the event of its end."""
        if self.module is None:
            work()
            return FinishedEvent()
        stream = self.stream or self.module.current_stream()
        for earlier in after:
            if not isinstance(earlier, FinishedEvent):
                stream.wait_event(earlier)
        with self.module.stream(stream):
            work()
        end = self.module.Event()
        end.record(stream)
        return end

    def uses(self, x: torch.Tensor) -> None:
        """Keep the memory of `x`, which another stream allocated, from reuse until this stream is done with it."""
        if self.stream is not None:
            x.record_stream(self.stream)
