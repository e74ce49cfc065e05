"""A backend that a block of code insists on."""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class Forced:
    """The backend that one operator is told to use: of this thread or asyncio task, "" where nobody has said.

    Backward need not ask: a node keeps what its forward was told. Code that torch.compile made asks its thread, since
    a tracer can guard that and no context variable.
    """

    def __init__(self, operator: str) -> None:
        self._context: ContextVar[str] = ContextVar(f"whorl.{operator}.backend", default="")
        self._thread = threading.local()
        self.here = self._context.get  # for callers that nobody traces

    def get(self) -> str:
        if torch.compiler.is_compiling():
            found: str = getattr(self._thread, "backend", "")
            return found
        return self._context.get()

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        before = getattr(self._thread, "backend", "")
        token = self._context.set(backend)
        self._thread.backend = backend
        try:
            yield
        finally:
            self._thread.backend = before
            self._context.reset(token)
