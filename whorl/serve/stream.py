"""Server-sent events."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .api_error import ApiError
from .dialects import dialect_for, last_event
from .gate import STEERING

# Proxies must neither cache an answer nor buffer it before passing it on.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


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
