"""A progress bar on standard error; it shows nothing where that is not a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Progress:
    """A bar of `total` parts: `with Progress(3) as progress:`, then `with progress("decode"):` around each part.

    `describe` and `advance` do the same by hand.
    """

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("", total=total)

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

    def advance(self) -> None:
        self._bar.advance(self._task)
