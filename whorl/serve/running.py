"""Tracks the requests in progress, so that a shutdown whose time is up can end each of them with an error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .engine_thread import EngineError


class Running:
    """The requests in progress on one event loop. num_ended: how many were ended before they had finished."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()  # one for each request; `end` lets them expire
        self._reason: str | None = None
        self.num_ended = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Surround the work for one request; raises EngineError inside it once `end` is called."""
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
        """End all requests in progress and refuse new ones."""
        self._reason = reason
        self.num_ended += len(self._limits)
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
