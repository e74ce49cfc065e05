"""A bar on standard error that says what is being measured; nothing where that is not a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Progress:
    """`with Progress(3) as progress:`, then `with progress("what"):` around each of the three; or `say`, `advance`."""

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
    def __call__(self, what: str) -> Iterator[None]:
        self.say(what)
        yield
        self.advance()

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self) -> None:
        self._bar.advance(self._task)
