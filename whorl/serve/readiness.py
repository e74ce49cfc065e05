"""Whether the engine takes requests yet: what it goes through before the first one, and how far it is."""

import time
from collections.abc import Callable, Iterable

from whorl.engine.warmup import Warming


class WarmingUp(RuntimeError):
    """The engine does not serve yet. progress: how far it is; seconds: that are left, about."""

    def __init__(self, progress: Warming | None, seconds: float) -> None:
        done = "" if progress is None else f": {progress.done} of {progress.total} steps are done"
        super().__init__(f"the server is warming up{done}")
        self.progress, self.seconds = progress, seconds


class Readiness:
    """warming: what is gone through before; it ends early where the server is to stop, which is then never ready."""

    def __init__(self, warming: Iterable[Warming] = ()) -> None:
        self.is_ready = False
        self.on_ready: Callable[[], None] = lambda: None
        self.progress: Warming | None = None
        self._warming = warming
        self._started = time.monotonic()

    def check(self) -> None:
        if not self.is_ready:
            raise WarmingUp(self.progress, self._seconds_left())

    def _seconds_left(self) -> float:
        """As if every step of the warm-up took as long as those so far."""
        if self.progress is None:
            return 0.0
        took = time.monotonic() - self._started
        return took * (self.progress.total - self.progress.done) / self.progress.done

    def warm_up(self, is_stopping: Callable[[], bool]) -> None:
        """On the engine's thread."""
        self._started = time.monotonic()
        for self.progress in self._warming:  # noqa: B020 (an attribute of another name)
            if is_stopping():
                self._warming = ()  # where it has a bar, that goes
                return
        self.is_ready = True
        self.on_ready()
