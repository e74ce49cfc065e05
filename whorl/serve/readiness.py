"""Whether the engine takes requests yet: the warm-up before the first one, and its progress."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whorl.engine.warmup import Warming


class WarmingUp(RuntimeError):
    """The engine does not serve yet. progress: of the warm-up; seconds: an estimate of the time that is left."""

    def __init__(self, progress: "Warming | None", seconds: float) -> None:
        done = "" if progress is None else f": {progress.done} of {progress.total} steps are done"
        super().__init__(f"the server is warming up{done}")
        self.progress, self.seconds = progress, seconds


class Readiness:
    """Runs the warm-up and says when it is done.

    warming: the steps of the warm-up. It ends early when the server is to stop, which is then never ready. on_warm is
    called after the last step, before any request is taken; on_ready when requests are taken.
    """

    def __init__(self, warming: "Iterable[Warming]" = ()) -> None:
        self.is_ready = False
        self.on_warm: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.progress: Warming | None = None
        self._warming = warming
        self._started = time.monotonic()

    def check(self) -> None:
        """Raise WarmingUp until the warm-up is done."""
        if not self.is_ready:
            raise WarmingUp(self.progress, self._seconds_left())

    def _seconds_left(self) -> float:
        """Estimate from the mean time of the steps so far."""
        if self.progress is None:
            return 0.0
        took = time.monotonic() - self._started
        return took * (self.progress.total - self.progress.done) / self.progress.done

    def warm_up(self, is_stopping: Callable[[], bool]) -> None:
        """Run the warm-up; called on the engine's thread."""
        self._started = time.monotonic()
        for self.progress in self._warming:  # noqa: B020 (an attribute of another name)
            if is_stopping():
                self._warming = ()  # drops the iterator, which removes its progress bar
                return
        self.on_warm()
        self.is_ready = True
        self.on_ready()
