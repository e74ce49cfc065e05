"""Limits on connections: how many may be open, and how long one may stay open without a request.

uvicorn closes a connection that stays silent after a response. It keeps for ever one that never sends a request, sends
its headers byte by byte, or does not read; once these use up all file descriptors, no client can connect any more.
"""

import asyncio
import errno
import json
import logging
import os
import socket
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .api_error import ApiError
from .dialects import error_response

_LOG = logging.getLogger("whorl.serve")
_MOST = 4096
_FEWEST = 8
_RESERVED = 32  # file descriptors for the model, logs and child processes
_SPARE = 8  # connections beyond the limit, whose requests are answered with an error
_YOUNG = 1.0  # seconds: the request of a younger connection may be on its way, so it is not closed as idle
_CLOSING = 5.0  # seconds for the client to read the remaining bytes when a connection is closed
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """Return how many connections the limit on open files (`ulimit -n`) leaves room for."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # not Linux: the limit is unknown
        return _MOST
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, limit - num_open - _RESERVED - _SPARE))


class Connections:
    """The connections of one server.

    most: how many may be open at once; None: `most_connections`. head_seconds: how long a connection may take until
    its request's headers are complete.
    """

    def __init__(self, *, most: int | None, head_seconds: float) -> None:
        self.most, self.head_seconds = most_connections() if most is None else most, head_seconds
        self._all: set[Any] = set()
        self._idle: dict[Any, float] = {}  # since when each has been idle; the longest first
        self._closing: dict[Any, float] = {}  # since when each has been closing

    def protocol(self) -> type[asyncio.Protocol]:
        """Return uvicorn's HTTP protocol class, extended to report its events to this object."""
        connections = self

        class Watched(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                connections._open(self)

            def connection_lost(self, exc: Exception | None) -> None:
                connections._forget(self)
                super().connection_lost(exc)

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                connections._update(self)

            def on_response_complete(self) -> None:
                super().on_response_complete()
                connections._update(self)

            def send_400_response(self, msg: str) -> None:
                _answer(self.transport, ApiError(400, f"this is not HTTP: {msg}", code="invalid_http"))

        return Watched

    def sweep(self) -> None:
        """Close connections that were idle too long, abort those that do not read their last bytes.

        Called about every half second.
        """
        now = _now()
        for connection in [c for c, since in self._idle.items() if now - since > self.head_seconds]:
            self._close(connection)
        for connection in list(self._all):
            if connection.transport.is_closing() and now - self._closing.setdefault(connection, now) > _CLOSING:
                connection.transport.abort()

    def _open(self, connection: Any) -> None:
        """Count a new connection. Over the limit, close the one idle longest; if that one is too young, refuse this
        one, and far over the limit abort it without an answer."""
        self._all.add(connection)
        self._idle[connection] = _now()
        if len(self._all) > self.most and not self._make_room():
            _LOG.warning("a client was refused: %d connections are open, which is the limit", self.most)
            connection.app = _refuse
            if len(self._all) > self.most + _SPARE:
                connection.transport.abort()

    def _make_room(self) -> bool:
        """Abort the connection that has been idle longest; False when that one is too young."""
        oldest, since = next(iter(self._idle.items()))
        if _now() - since < _YOUNG:
            return False
        oldest.transport.abort()
        self._forget(oldest)
        return True

    def _update(self, connection: Any) -> None:
        """Mark a connection as idle unless it has a request in progress; incomplete headers are not a request."""
        if connection not in self._all:
            return
        if connection.cycle is not None and not connection.cycle.response_complete:
            self._idle.pop(connection, None)
        else:
            self._idle.setdefault(connection, _now())

    def _close(self, connection: Any) -> None:
        """Close an idle connection; a client that never sent a whole request is told why."""
        self._idle.pop(connection, None)
        if connection.cycle is None:
            seconds = f"{self.head_seconds:g} seconds"
            _answer(connection.transport, ApiError(408, f"no whole request arrived within {seconds}", code="timeout"))
        else:
            connection.transport.close()

    def _forget(self, connection: Any) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)
        self._closing.pop(connection, None)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _answer(transport: Any, error: ApiError) -> None:
    """Send an error to a client whose request has not reached the application."""
    body = json.dumps(error.body()).encode()
    reason = {400: "Bad Request", 408: "Request Timeout"}[error.status]
    head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
    transport.close()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"Retry-After": "1", "Connection": "close"}
    message = "this server has reached its limit of open connections. Try again later."
    error = ApiError(503, message, code="too_many_connections", headers=headers)
    await error_response(error, scope)(scope, receive, send)


class Listener(socket.socket):
    """A listening socket that turns connections away when file descriptors run out.

    Without it the event loop retries accept() thousands of times a second and logs a traceback each time. This class
    keeps one spare descriptor: closing that lets it accept the connection and close it at once.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in _NO_FILES:
                raise
            _LOG.error("a connection was turned away: %s", error.strerror)
            self._turn_away()
            raise BlockingIOError from error  # the event loop then waits for the next connection

    def close(self) -> None:
        self._give_up_spare()
        super().close()

    def _give_up_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _turn_away(self) -> None:
        self._give_up_spare()
        try:
            super().accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:  # another thread took the descriptor; the next call may get it back
            pass


def listen(host: str, port: int) -> list[Listener]:
    """Listen on every address that the host's name has, all with the same port."""
    listeners: list[Listener] = []
    for family, kind, proto, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address[0], listeners[0].getsockname()[1], *address[2:]) if listeners else address)
        listeners.append(Listener(listening))
    return listeners
