"""Connections: how many there may be, and how long one may hold its place without asking for anything.

uvicorn ends a connection that is silent behind an answer. One that never asks, sends its headers letter by letter or
does not read would stay for ever; and where files run out, nobody gets in any more.
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

from .dialects import refusal
from .gate import ApiError

_LOG = logging.getLogger("whorl.serve")
_MOST = 4096
_FEWEST = 8
_RESERVED = 32  # files, for the model, logs and child processes
_SPARE = 8  # connections beyond the limit: each reads its request, and is told
_YOUNG = 1.0  # seconds; a connection this young is not taken for idle, its request may be on the way
_CLOSING = 5.0  # seconds to take what is still unsent when a connection is closed
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """As many as there are files left for, which `ulimit -n` says."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # another system: no limit is known
        return _MOST
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, limit - num_open - _RESERVED - _SPARE))


class Connections:
    """Those of one server. most: at once; head_seconds: that one may take until its request begins."""

    def __init__(self, *, most: int | None, head_seconds: float) -> None:
        self.most, self.head_seconds = most_connections() if most is None else most, head_seconds
        self._all: set[Any] = set()
        self._idle: dict[Any, float] = {}  # since when; the longest first
        self._closing: dict[Any, float] = {}

    def protocol(self) -> type[asyncio.Protocol]:
        """uvicorn's, which tells this object what happens."""
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
                connections._note(self)

            def on_response_complete(self) -> None:
                super().on_response_complete()
                connections._note(self)

            def send_400_response(self, msg: str) -> None:
                _answer(self.transport, ApiError(400, f"this is not HTTP: {msg}", code="invalid_http"))

        return Watched

    def sweep(self) -> None:
        """Every second or so: close what has idled too long, and cut off what does not take its last bytes."""
        now = _now()
        for one in [one for one, since in self._idle.items() if now - since > self.head_seconds]:
            self._close(one)
        for one in list(self._all):
            if one.transport.is_closing() and now - self._closing.setdefault(one, now) > _CLOSING:
                one.transport.abort()

    def _open(self, one: Any) -> None:
        self._all.add(one)
        self._idle[one] = _now()
        if len(self._all) > self.most and not self._make_room():
            _LOG.warning("%d connections are open, as many as there may be: a client was refused", self.most)
            one.app = _refuse
            if len(self._all) > self.most + _SPARE:
                one.transport.abort()

    def _make_room(self) -> bool:
        oldest, since = next(iter(self._idle.items()))
        if _now() - since < _YOUNG:
            return False
        oldest.transport.abort()
        self._forget(oldest)
        return True

    def _note(self, one: Any) -> None:
        """Idle is what has no request in progress: half a request's head is none."""
        if one not in self._all:
            return
        if one.cycle is not None and not one.cycle.response_complete:
            self._idle.pop(one, None)
        else:
            self._idle.setdefault(one, _now())

    def _close(self, one: Any) -> None:
        self._idle.pop(one, None)
        if one.cycle is None:
            seconds = f"{self.head_seconds:g} seconds"
            _answer(one.transport, ApiError(408, f"no whole request arrived within {seconds}", code="timeout"))
        else:
            one.transport.close()

    def _forget(self, one: Any) -> None:
        self._all.discard(one)
        self._idle.pop(one, None)
        self._closing.pop(one, None)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _answer(transport: Any, error: ApiError) -> None:
    """An error to a client whose request no application has seen."""
    body = json.dumps(error.body()).encode()
    reason = {400: "Bad Request", 408: "Request Timeout"}[error.status]
    head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
    transport.close()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"Retry-After": "1", "Connection": "close"}
    message = "this server has as many connections as it may. Try again later."
    error = ApiError(503, message, code="too_many_connections", headers=headers)
    await refusal(error, scope)(scope, receive, send)


class Listener(socket.socket):
    """A listening socket that turns connections away where files run out.

    The event loop would ask again and again, thousands of times a second with a traceback each. One file is kept for
    this: given up, it lets the connection be taken, and closed.
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
            raise BlockingIOError from error  # nothing to accept: as if nobody had come

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
        except OSError:  # another thread took the file: the next attempt has it back, or the client gives up
            pass


def listen(host: str, port: int) -> list[Listener]:
    """On every address that the host's name has, all with the same port."""
    found: list[Listener] = []
    for family, kind, proto, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address[0], found[0].getsockname()[1], *address[2:]) if found else address)
        found.append(Listener(listening))
    return found
