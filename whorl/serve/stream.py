"""Server-sent events, and ways to notice that nobody listens any more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .dialects import REQUEST_NUMBER, dialect_of
from .gate import STEERING, ApiError

# Proxies must neither keep an answer nor collect it before passing it on.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_CLIENT_CLOSED = 499  # nginx's number; nobody reads it


class EventStream(StreamingResponse):
    """Chunks as events, in the address's dialect. `close` runs when the answer is over, however it ends."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], scope: Scope, close: Callable[[], None]) -> None:
        super().__init__(_events(chunks, scope), media_type="text/event-stream", headers=_HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(chunks: AsyncIterator[dict[str, Any]], scope: Scope) -> AsyncIterator[str]:
    dialect = dialect_of(scope["path"])
    try:
        async for chunk in chunks:
            yield dialect.event(chunk)
    except STEERING:
        raise
    except BaseException as error:  # the status is out: the error travels in the stream
        yield dialect.last_event(ApiError.of(error), scope.get(REQUEST_NUMBER))
    else:
        yield dialect.done


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of the work, which is cancelled when the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
