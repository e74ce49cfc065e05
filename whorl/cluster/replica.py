"""One replica: an engine with the whole server's application over it, which it asks itself, without a port."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .asked import END, Asked, Message

if TYPE_CHECKING:
    from fastapi import FastAPI

    from whorl.serve.settings import ServerSettings

WEIGHTS = b"x-whorl-weights"  # a header: which weights answered, counted from 1
_FAILED = 70  # exit code of a replica whose engine failed
_CHARGED: ContextVar[list[int]] = ContextVar("whorl_charged")


def settings_of_replicas(settings: "ServerSettings") -> "ServerSettings":
    """Who may ask, from where and how much is the endpoint's to say; keys stay, since each has its own prefix cache."""
    keys = tuple(
        replace(key, max_running=None, requests_per_minute=None, tokens_per_minute=None) for key in settings.more_keys
    )
    return replace(settings, allowed_hosts=("*",), origins=(), more_keys=keys)


class Replica:
    """What Ray Serve makes one of in each process. make: loads the model. weights: which, see `WEIGHTS`."""

    def __init__(self, make: "Callable[[], FastAPI]", weights: int = 1) -> None:
        self._app: Any = make()
        self._service = self._app.state.service
        self._weights = str(weights).encode()
        self._service.uses[:] = [_use(each.key) for each in self._service.uses]
        # A replica whose engine failed is of no use: as a dead one its requests are answered, and it is replaced.
        self._service.engine.on_failure = lambda: os._exit(_FAILED)
        self._start: asyncio.Task[None] | None = None

    async def _started(self) -> None:
        if self._start is None:
            self._start = asyncio.get_running_loop().create_task(self._warmed())
        await asyncio.shield(self._start)

    async def _warmed(self) -> None:
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        self._service.engine.readiness.on_ready = lambda: loop.call_soon_threadsafe(ready.set)
        await self._service.start()
        await ready.wait()

    async def check_health(self) -> None:
        """Ray Serve asks for it before the first request, and then every few seconds: it raises where one is ill."""
        await self._started()
        response = await self._service.health()
        if response.status_code != 200:
            raise RuntimeError(f"the replica is not healthy: {bytes(response.body).decode()}")

    async def answer(self, asked: Asked) -> AsyncGenerator[Message, None]:
        """The application's messages, and `END`. Where nobody waits for them any more the request is ended."""
        await self._started()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, charged = asyncio.Event(), list[int]()
        _CHARGED.set(charged)
        bodies = [asked.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        task = asyncio.get_running_loop().create_task(self._app(asked.scope(), receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message = message | {"headers": [*message["headers"], (WEIGHTS, self._weights)]}
                yield message
            await task  # raises what it failed with
            yield {"type": END, "tokens": sum(charged)}
        finally:
            gone.set()
            task.cancel()

    async def metrics(self) -> str:
        """What it counts, in Prometheus's text format."""
        return self._service.metrics.render()[0].decode()

    async def cached_tokens(self) -> int:
        """That the prefix cache has room for."""
        pool = self._service.engine.llm.pool
        return pool.num_blocks * pool.block_size


def _use(key: Any) -> Any:
    """Of a key: what its requests are charged is told to the endpoint, which holds the limits."""
    from whorl.serve.key_limits import KeyUse

    class Told(KeyUse):
        def charge(self, num_tokens: int) -> None:
            _CHARGED.get().append(num_tokens)

    return Told(key)
