"""One replica: an engine with the server's whole ASGI application, which is called directly, without a port."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whorl.engine.heap import keep_objects
from whorl.serve.key_limits import KeyUse
from whorl.serve.settings import ServerSettings

from .forwarded import END, ForwardedRequest, Message

if TYPE_CHECKING:
    from fastapi import FastAPI

WEIGHTS = b"x-whorl-weights"  # a response header: the number of the deployment whose weights answered, from 1
_FAILED = 70  # exit code of a replica whose engine failed
_CHARGED: ContextVar[list[int]] = ContextVar("whorl_charged")


def replica_settings(settings: ServerSettings) -> ServerSettings:
    """Return the settings without what the endpoint enforces: hosts, origins and the limits of keys.

    The keys themselves stay, since each has its own prefix cache.
    """
    keys = tuple(
        replace(key, max_running=None, requests_per_minute=None, tokens_per_minute=None) for key in settings.more_keys
    )
    return replace(settings, allowed_hosts=("*",), origins=(), more_keys=keys)


class Replica:
    """One replica, which Ray Serve creates in its own process. make: loads the model. weights: see `WEIGHTS`."""

    def __init__(self, make: "Callable[[], FastAPI]", weights: int = 1) -> None:
        self._app: Any = make()
        self._service = self._app.state.service
        self._weights = str(weights).encode()
        self._service.uses[:] = [_ChargeRecorder(use.key) for use in self._service.uses]
        # A replica whose engine failed is useless. Once its process is dead, its requests go to others and Ray
        # replaces it.
        self._service.engine.on_failure = lambda: os._exit(_FAILED)
        self._start: asyncio.Task[None] | None = None

    async def _ensure_started(self) -> None:
        if self._start is None:
            self._start = asyncio.get_running_loop().create_task(self._start_and_warm_up())
        await asyncio.shield(self._start)

    async def _start_and_warm_up(self) -> None:
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        self._service.engine.readiness.on_warm = keep_objects
        self._service.engine.readiness.on_ready = lambda: loop.call_soon_threadsafe(ready.set)
        await self._service.start()
        await ready.wait()

    async def check_health(self) -> None:
        """Raise if the replica is not healthy; Ray Serve calls this before the first request and every few seconds."""
        await self._ensure_started()
        response = await self._service.health()
        if response.status_code != 200:
            raise RuntimeError(f"the replica is not healthy: {bytes(response.body).decode()}")

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        """Yield the application's messages, then `END`. Closing the generator aborts the request."""
        await self._ensure_started()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        disconnected, charged = asyncio.Event(), list[int]()
        _CHARGED.set(charged)
        bodies = [request.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        task = asyncio.get_running_loop().create_task(self._app(request.scope(), receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message = message | {"headers": [*message["headers"], (WEIGHTS, self._weights)]}
                yield message
            await task  # raises the application's exception, if any
            yield {"type": END, "tokens": sum(charged)}
        finally:
            disconnected.set()
            task.cancel()

    async def metrics(self) -> str:
        """Return the metrics in Prometheus's text format."""
        return self._service.metrics.render()[0].decode()

    async def cached_tokens(self) -> int:
        """Return how many tokens the prefix cache has room for."""
        pool = self._service.engine.llm.pool
        return pool.num_blocks * pool.block_size


class _ChargeRecorder(KeyUse):
    """Records the tokens of a request for the endpoint, which enforces the limits."""

    def charge(self, num_tokens: int) -> None:
        _CHARGED.get().append(num_tokens)
