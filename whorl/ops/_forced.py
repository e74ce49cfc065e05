"""The backend that a `with op.using(...)` block forces."""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class Forced:
    """The backend that one operator is forced to use in this thread or asyncio task; "" where none is forced.

    Backward does not read it: an autograd node stores the backend that was forced in its forward. The value is kept
    twice, in a context variable and in a thread-local, because torch.compile can guard only the thread-local.
    """

    def __init__(self, operator: str) -> None:
        self._context: ContextVar[str] = ContextVar(f"whorl.{operator}.backend", default="")
        self._thread = threading.local()
        self.here = self._context.get  # a faster `get`, for callers that torch.compile does not trace

    def get(self) -> str:
        """Return the forced backend, or "" where none is forced."""
        if torch.compiler.is_compiling():
            backend: str = getattr(self._thread, "backend", "")
            return backend
        return self._context.get()

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Force a backend inside the block."""
        before = getattr(self._thread, "backend", "")
        token = self._context.set(backend)
        self._thread.backend = backend
        try:
            yield
        finally:
            self._thread.backend = before
            self._context.reset(token)
