"""What every request passes first: its number, whence it comes, the key, the size of its body. And every error."""

import asyncio
import hmac
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whorl.engine.sequence import AllowError

from .dialects import REQUEST_NUMBER, dialect_of, refusal
from .engine_thread import EngineError, QueueFull
from .hosts import refused_host, refused_origin
from .readiness import WarmingUp
from .request_log import NUMBER, log_request
from .running import Running

if TYPE_CHECKING:
    from .key_limits import KeyUse

_LOG = logging.getLogger("whorl.serve")
# Probes and scrapers have no key; the page is where people enter theirs.
_OPEN = ("/health", "/metrics", "/")
# What steers the program. Every other exception is answered, a panic of a library in Rust too, which is no Exception.
STEERING = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
KEY_NUMBER = "whorl.key_number"  # in a request's scope: whose it is
_LONGEST_WAIT = 30  # seconds, before a client asks again whether the server is ready
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error", 503: "server_error"}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        """What an error of the engine or of a check means to a client."""
        if isinstance(error, cls):
            return error
        if isinstance(error, QueueFull):
            return cls(429, f"{error}. Try again later.", code="queue_full", headers={"Retry-After": "1"})
        if isinstance(error, WarmingUp):
            wait = str(max(1, min(_LONGEST_WAIT, math.ceil(error.seconds))))
            return cls(503, f"{error}. Try again later.", code="warming_up", headers={"Retry-After": wait})
        if isinstance(error, EngineError):
            return cls(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
        if isinstance(error, TimeoutError):
            return cls(503, str(error) or "the request took too long", code="timeout")
        if isinstance(error, AllowError):
            return cls(400, str(error), code="schema_limit")
        if isinstance(error, UnicodeError):
            return cls(400, "the text is not valid Unicode")
        if isinstance(error, ValueError | RecursionError):
            return cls(400, str(error))
        _LOG.error("a request failed", exc_info=error)
        return cls(500, f"{type(error).__name__}: see the server's log", code="internal_error")

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # Half a surrogate pair may come in by JSON, and cannot go out.
        message = self.message.encode("utf-8", "replace").decode()
        param = self.param and self.param.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


class Gate:
    """ASGI middleware. The body is read here, whole: within its size and time, or not at all."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        running: Running,
        keys: Sequence[str],
        allowed_hosts: Sequence[str],
        max_body: int,
        body_seconds: float,
        origins: Sequence[str] = (),
        larger: Mapping[str, int] | None = None,
        uses: "Sequence[KeyUse]" = (),
    ) -> None:
        """max_body: bytes. larger: by address, where more are taken. uses: of the keys, in order; (): unlimited."""
        self.app, self.running, self.max_body, self.body_seconds = app, running, max_body, body_seconds
        self._larger, self._uses, self._origins = larger or {}, uses, origins
        self._keys, self._allowed_hosts = [key.encode() for key in keys], allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(scope, send, self.body_seconds)
        token = NUMBER.set(answer.number)
        began = time.monotonic()
        try:
            await self._answer(scope, receive, answer)
        finally:
            NUMBER.reset(token)
            use = self._use(scope)
            name, seconds = None if use is None else use.key.name, time.monotonic() - began
            log_request(scope, status=answer.status, seconds=seconds, number=answer.number, key_name=name)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        try:
            async with self.running.request():
                self._check_host(scope)
                self._check_origin(scope)
                self._check_key(scope)
                _check_kind(scope)
                use = self._use(scope) if scope["method"] == "POST" else None
                with use.request() if use is not None else nullcontext():
                    body = await self._read(scope, receive)
                    await self.app(scope, _replay(body, receive), answer.send)
        except STEERING:
            raise
        except ConnectionAbortedError as error:  # nobody to tell; the server closes what was not finished
            _LOG.warning("a request was given up: %s", error)
        except BaseException as error:
            if answer.begun is None:
                await refusal(ApiError.of(error), scope)(scope, receive, answer.send)
            elif _is_stream(answer.begun):
                await answer.end_stream(ApiError.of(error))
            else:
                raise

    def _use(self, scope: Scope) -> "KeyUse | None":
        number = scope.get(KEY_NUMBER)
        return None if number is None or not self._uses else self._uses[number]

    def _check_host(self, scope: Scope) -> None:
        if reason := refused_host(scope, self._allowed_hosts):
            raise ApiError(421, reason, code="unknown_host")

    def _check_origin(self, scope: Scope) -> None:
        if reason := refused_origin(scope, self._origins):
            raise ApiError(403, reason, code="unknown_origin")

    def _check_key(self, scope: Scope) -> None:
        # A browser asks without a key whether it may ask with one.
        if not self._keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if not kind and (own := headers.get("x-api-key")):  # as Anthropic's clients send it
            kind, key = "bearer", own
        key = key.strip(" \t")  # nothing else: headers are read as Latin-1, where half a letter may look like a space
        found = [hmac.compare_digest(key.encode("latin-1"), each) for each in self._keys]
        if kind.lower() != "bearer" or not any(found):
            what = "is wrong" if key else "is missing: send the header Authorization: Bearer KEY, or X-Api-Key: KEY"
            header = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, f"the API key {what}", code="invalid_api_key", headers=header)
        scope[KEY_NUMBER] = found.index(True)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        announced = Headers(scope=scope).get("content-length", "")
        limit = max(self.max_body, self._larger.get(scope["path"], 0))
        if announced.isdigit():
            _check_size(int(announced), limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return bytes(body)
                    body += message.get("body", b"")
                    _check_size(len(body), limit)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.body_seconds:g} seconds") from None


class _Answer:
    """What goes out for one request, with its number in the headers."""

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        number = Headers(scope=scope).get("x-request-id", "")
        is_fit = number.isascii() and number.isprintable() and 0 < len(number) <= 128
        self.number: str = number if is_fit else uuid.uuid4().hex
        scope[REQUEST_NUMBER] = self.number
        self.begun: Message | None = None
        self._dialect, self._send, self._seconds = dialect_of(scope["path"]), send, seconds

    @property
    def status(self) -> int | None:
        return None if self.begun is None else self.begun["status"]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = message
            for name in ("x-request-id", self._dialect.number_header):
                MutableHeaders(scope=message)[name] = self.number
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise ConnectionAbortedError("the client does not take its answer") from None

    async def end_stream(self, error: ApiError) -> None:
        event = self._dialect.last_event(error, self.number)
        await self._send({"type": "http.response.body", "body": event.encode()})


class Cors(CORSMiddleware):
    """Starlette's, with refusals in this server's form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = ApiError(response.status_code, bytes(response.body).decode(), code="cors")
        return JSONResponse(error.body(), error.status)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(413, f"the body has {size} bytes; up to {limit} are taken", code="body_too_large")


def _is_stream(begun: Message) -> bool:
    return Headers(raw=begun["headers"]).get("content-type", "").startswith("text/event-stream")


def _check_kind(scope: Scope) -> None:
    """A web page of anybody's may send a form or plain text to any address, but JSON only where it is let."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json":
        found = f"is {kind}" if kind else "is missing"
        raise ApiError(415, f"the header Content-Type {found}: send application/json", code="unsupported_media_type")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever follows: the end of the connection."""
    is_given = False

    async def replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
