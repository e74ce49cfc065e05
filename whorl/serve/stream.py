"""Server-sent events, and the detection of clients that disconnect."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .api_error import ApiError
from .dialects import dialect_for, last_event
from .gate import STEERING

# Proxies must neither cache an answer nor buffer it before passing it on.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; nobody receives it


class EventStream(StreamingResponse):
    """Sends chunks as events in the dialect of the route. `close` runs when the stream is over, however it ends."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], scope: Scope, close: Callable[[], None]) -> None:
        super().__init__(_events(chunks, scope), media_type="text/event-stream", headers=_HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(chunks: AsyncIterator[dict[str, Any]], scope: Scope) -> AsyncIterator[str]:
    """Yield the text of each event, then the end of the stream or an event with the error."""
    dialect = dialect_for(scope["path"])
    try:
        async for chunk in chunks:
            yield dialect.event(chunk)
    except STEERING:
        raise
    except BaseException as error:  # status 200 has been sent already, so the error is an event
        yield last_event(ApiError.from_exception(error), scope)
    else:
        yield dialect.done


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of `work`; cancel it when the client closes the connection first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
