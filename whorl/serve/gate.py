"""What every request passes first: its number, the key, the size of its body. And the shape of every error."""

import asyncio
import hmac
import json
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whorl.engine.sequence import AllowError

from .engine_thread import EngineError, QueueFull
from .hosts import refused_host
from .readiness import WarmingUp
from .running import Running

_LOG = logging.getLogger("whorl.serve")
# Probes and scrapers have no key; the page is where people enter theirs.
_OPEN = ("/health", "/metrics", "/")
DONE = "data: [DONE]\n\n"  # what a stream of events ends with
# What steers the program. Every other exception is answered, a panic of a library in Rust too, which is no Exception.
STEERING = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
KEY_NUMBER = "whorl.key_number"  # in a request's scope: whose it is
_LONGEST_WAIT = 30  # seconds, before a client asks again whether the server is ready
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}


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

    def event(self) -> str:
        """The last of a stream of events."""
        return f"data: {json.dumps(self.body(), ensure_ascii=False, separators=(',', ':'))}\n\n{DONE}"

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=dict(self.headers or {}))


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
        larger: Mapping[str, int] | None = None,
    ) -> None:
        """max_body: bytes. larger: by address, where more are taken."""
        self.app, self.running, self.max_body, self.body_seconds = app, running, max_body, body_seconds
        self._larger = larger or {}
        self._keys, self._allowed_hosts = [key.encode() for key in keys], allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        number = Headers(scope=scope).get("x-request-id", "")
        number = number if number.isascii() and number.isprintable() and 0 < len(number) <= 128 else uuid.uuid4().hex
        begun: Message | None = None

        async def send_numbered(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message
                MutableHeaders(scope=message)["x-request-id"] = number
            try:
                async with asyncio.timeout(self.body_seconds):
                    await send(message)
            except TimeoutError:
                raise ConnectionAbortedError("the client does not take its answer") from None

        try:
            async with self.running.request():
                self._check_host(scope)
                self._check_key(scope)
                _check_kind(scope)
                body = await self._read(scope, receive)
                await self.app(scope, _replay(body, receive), send_numbered)
        except STEERING:
            raise
        except ConnectionAbortedError as error:  # nobody to tell; the server closes what was not finished
            _LOG.warning("a request was given up: %s", error)
        except BaseException as error:
            if begun is None:
                await ApiError.of(error).response()(scope, receive, send_numbered)
            elif _is_stream(begun):
                await send({"type": "http.response.body", "body": ApiError.of(error).event().encode()})
            else:
                raise

    def _check_host(self, scope: Scope) -> None:
        if reason := refused_host(scope, self._allowed_hosts):
            raise ApiError(421, reason, code="unknown_host")

    def _check_key(self, scope: Scope) -> None:
        # A browser asks without a key whether it may ask with one.
        if not self._keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        key = key.strip(" \t")  # nothing else: headers are read as Latin-1, where half a letter may look like a space
        found = [hmac.compare_digest(key.encode("latin-1"), each) for each in self._keys]
        if kind.lower() != "bearer" or not any(found):
            what = "is wrong" if key else "is missing: send the header Authorization: Bearer KEY"
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


class Cors(CORSMiddleware):
    """Starlette's, with refusals in this server's form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        return ApiError(response.status_code, bytes(response.body).decode(), code="cors").response()


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


def validation_error(errors: Any, body: Any) -> ApiError:
    """FastAPI's list of what is wrong with a body, as one error: the first, as deep in the body as it goes.

    Of a field that may be one of several kinds, each kind complains; the one that got furthest was meant.
    """
    if errors[0].get("type") == "json_invalid":
        reason = json.dumps(str(errors[0].get("ctx", {}).get("error", "")))
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    places = [_place(error, body) for error in errors]
    meant = [i for i, place in enumerate(places) if place[: len(places[0])] == places[0]]
    chosen = max(meant, key=lambda i: len(places[i]))
    place, error = places[chosen], errors[chosen]
    others = {other for other in places if other != place[: len(other)]}
    more = f" (and {len(others)} more)" if others else ""
    param = ".".join(step[:100] for step in place) or None
    return ApiError(400, f"{param}: {_message(error)}{more}" if param else f"{_message(error)}{more}", param=param)


def _place(error: Any, body: Any) -> tuple[str, ...]:
    """Where in the body, without the names of the kinds that a field may have, which stand between."""
    steps = [step for step in error.get("loc", ()) if step != "body"]
    place = []
    for index, step in enumerate(steps):
        is_absent = error.get("type") == "missing" and index == len(steps) - 1
        if isinstance(body, dict) and str(step) in body:
            body = body[str(step)]
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            body = body[step]
        elif not is_absent:
            continue
        place.append(str(step))
    return tuple(place)


def _message(error: Any) -> str:
    message = str(error.get("msg", "invalid")).removeprefix("Value error, ")
    if error.get("type") == "extra_forbidden":
        return "is not a parameter that this server knows"
    if error.get("type") == "literal_error" and isinstance(error.get("input"), str):
        return f"{message}, not {error['input'][:40]!r}"
    return message
