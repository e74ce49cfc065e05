"""A lane of the CPU that is as late as a stream can be."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class Late:
    """A lane of the CPU that works when it pleases: whoever did not wait for it reads what is not there yet."""

    def __init__(self, device: str, *, beside: bool = True) -> None:
        self.work: queue.Queue[Any] | None = queue.Queue() if beside else None
        if beside:
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        assert self.work is not None
        while True:
            work, after, mark = self.work.get()
            for other in after:
                other.synchronize()
            time.sleep(random.random() * 5e-4)
            work()
            mark.event.set()

    def run(self, work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        mark = Mark()
        if self.work is not None:
            self.work.put((work, tuple(after), mark))
            return mark
        for other in after:
            other.synchronize()
        work()
        mark.event.set()
        return mark

    def uses(self, x: Tensor) -> None: ...


class Mark:
    def __init__(self) -> None:
        self.event = threading.Event()

    def synchronize(self) -> None:
        assert self.event.wait(60), "a lane waits for itself"
