"""Tracks the requests in progress: whose they are, and what ends them before they have finished.

A request whose client left is cancelled, wherever it waits; so is one in progress when a shutdown's time is up.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from .engine_thread import EngineError

if TYPE_CHECKING:
    from starlette.types import Receive

# Whose request is handled: clients take turns wherever requests wait.
CURRENT_CLIENT: ContextVar[str | None] = ContextVar("whorl_client", default=None)


def client_name(key: int | None, address: str) -> str:
    """Return the name of a client: its API key, else its address, of which 64 bits count for IPv6.

    key: its index among the server's keys.
    """
    if key is not None:
        return f"key {key}"
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((parsed, 64), strict=False))


async def while_connected(work: Awaitable[None], receive: "Receive", *, is_answered: Callable[[], bool]) -> bool:
    """Run `work`, but cancel it when the client closes the connection before it is answered; False then."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not is_answered():
            return False
        await task
        return True
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)  # whatever a server sends, the work goes on


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
