"""The requests in progress, so that the end of a shutdown can end them: each one still gets its answer, an error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .engine_thread import EngineError


class Running:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._reason: str | None = None
        self.num_ended = 0  # requests that were not let finish

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Around the work for one request; EngineError inside once requests are ended."""
        if self._reason is not None:
            raise EngineError(self._reason)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise EngineError(str(self._reason)) from None
            raise

    def end(self, reason: str) -> None:
        """End what runs, and refuse what comes."""
        self._reason = reason
        self.num_ended += len(self._limits)
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
