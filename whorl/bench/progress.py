"""Progress on standard error: a bar on a terminal; elsewhere nothing or, for long benchmarks, lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_EVERY = 5.0  # seconds between lines about the same part
_started = time.perf_counter()


def say(text: str) -> None:
    """Print a line with the seconds since the start, unless standard error is a terminal, where bars say it."""
    if not sys.stderr.isatty():
        print(f"{time.perf_counter() - _started:7.1f} s  {text}", file=sys.stderr, flush=True)


class Progress:
    """A bar of `total` parts: `with Progress(3) as progress:`, then `with progress("decode"):` around each part.

    `describe` and `advance` do the same by hand. lines: where there is no terminal, print lines, so that the output of
    a run that was stopped shows how far it was.
    """

    def __init__(self, total: int, *, lines: bool = False) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("", total=total)
        self._lines, self._total, self._done = lines, total, 0
        self._description, self._said = "", 0.0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @contextmanager
    def __call__(self, description: str) -> Iterator[None]:
        self.describe(description)
        yield
        self.advance()

    def describe(self, description: str) -> None:
        self._bar.update(self._task, description=description)
        self._description = description
        self._say()

    def advance(self) -> None:
        self._bar.advance(self._task)
        self._done += 1
        if self._done == self._total or time.perf_counter() - self._said > _EVERY:
            self._say()

    def _say(self) -> None:
        if self._lines:
            self._said = time.perf_counter()
            say(f"{self._description}, {self._done} of {self._total} done")
