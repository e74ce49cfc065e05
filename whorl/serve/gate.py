"""Middleware that every request passes first: request id, host, origin, API key, body size."""

import asyncio
import hmac
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_error import ApiError
from .body import BODY, MAX_VALUES, Bodies, Body
from .dialects import REASON, REQUEST_ID, dialect_for, error_response, last_event
from .hosts import refused_host, refused_origin
from .request_log import CURRENT_ID, Outcome, log_request
from .running import CURRENT_CLIENT, Running, client_name, while_connected

if TYPE_CHECKING:
    from .key_limits import KeyUse
    from .settings import ServerSettings

# Paths that need no API key: probes and scrapers have none, nor have readers; the page is where people enter theirs.
_OPEN = ("/health", "/metrics", "/", "/docs", "/openapi.json")
# Paths whose messages may contain pictures.
_WITH_MEDIA = (
    *("/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions/render", "/inference/v1/generate"),
    *("/api/chat", "/api/generate"),
)
_WITH_HANDLES = ("/update_weights",)  # a handle for each of thousands of tensors, in base64
# Exceptions that stop a task or the program; they are passed on. Every other one becomes an error response, including
# a panic of a Rust library, which is a BaseException but not an Exception.
STEERING = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
_LARGE = 1 << 16  # bytes of a body that takes some time to parse
_NOTICE = 0.002  # seconds in which the server notices that a connection is closed
KEY_INDEX = "whorl.key_number"  # in a request's scope: the index of its API key among the server's keys


class Gate:
    """ASGI middleware that checks a request and reads its whole body, within limits on size and time."""

    def __init__(
        self,
        app: ASGIApp,
        settings: "ServerSettings",
        *,
        running: Running,
        uses: "Sequence[KeyUse]" = (),
        max_values: int = MAX_VALUES,
        takes_media: bool = False,
    ) -> None:
        """uses: the rate limits of the keys, in their order; (): no limits. max_values: numbers, texts and the like of
        one body. takes_media: bodies of some paths may be larger, for the sake of pictures."""
        self.app, self.running = app, running
        self.max_body, self.body_seconds = settings.max_body, settings.body_seconds
        self._bodies = Bodies(settings.max_bodies, max_values)
        larger = (*(_WITH_MEDIA if takes_media else ()), *(_WITH_HANDLES if settings.rl else ()))
        self._larger = dict.fromkeys(larger, settings.max_media_body)
        self._takes_empty = settings.rl
        self._uses, self._origins = uses, settings.origins
        self._keys, self._allowed_hosts = [key.encode() for key in settings.keys], settings.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(scope, send, self.body_seconds)
        token = CURRENT_ID.set(answer.request_id)
        began = time.monotonic()
        try:
            await self._answer(scope, receive, answer)
        finally:
            CURRENT_ID.reset(token)
            use = self._use(scope)
            outcome = Outcome(
                status=answer.status,
                seconds=time.monotonic() - began,
                request_id=answer.request_id,
                key_name=None if use is None else use.key.name,
                reason=scope.get(REASON),
            )
            log_request(scope, outcome)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        try:
            async with self.running.request():
                _check_framing(scope)
                self._check_host(scope)
                self._check_origin(scope)
                self._check_key(scope)
                _check_content_type(scope, may_be_empty=self._takes_empty)
                use = self._use(scope) if scope["method"] == "POST" else None
                most = max(self.max_body, self._larger.get(scope["path"], 0))
                with (
                    use.request() if use is not None else nullcontext(),
                    self._bodies.body(most=most, most_text=self.max_body) as body,
                ):
                    await self._read(body, scope, receive)
                    scope[BODY] = body
                    CURRENT_CLIENT.set(client_name(scope.get(KEY_INDEX), (scope.get("client") or ("",))[0]))
                    work = self.app(scope, body.replay(receive), answer.send)
                    if not await while_connected(work, receive, is_answered=lambda: answer.is_complete):
                        raise ConnectionAbortedError("the client closed the connection before its answer was complete")
        except STEERING:
            raise
        except ConnectionAbortedError as error:  # the client is gone; the server closes the unfinished connection
            scope[REASON] = str(error)
        except BaseException as error:
            if answer.start is None:
                await error_response(ApiError.from_exception(error), scope)(scope, receive, answer.send)
            elif _is_stream(answer.start, scope):
                await answer.end_stream(last_event(ApiError.from_exception(error), scope))
            else:
                raise

    def _use(self, scope: Scope) -> "KeyUse | None":
        """Return the limits of the request's API key; None: it has no key, or there are no limits."""
        index = scope.get(KEY_INDEX)
        return None if index is None or not self._uses else self._uses[index]

    def _check_host(self, scope: Scope) -> None:
        if reason := refused_host(scope, self._allowed_hosts):
            raise ApiError(421, reason, code="unknown_host")

    def _check_origin(self, scope: Scope) -> None:
        if reason := refused_origin(scope, self._origins):
            raise ApiError(403, reason, code="unknown_origin")

    def _check_key(self, scope: Scope) -> None:
        """Raise ApiError 401 unless the API key is right; put its index into the scope. Keys are compared in constant
        time."""
        # A browser's CORS preflight (OPTIONS) carries no key.
        if not self._keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if not kind and (api_key := headers.get("x-api-key")):  # as Anthropic's clients send it
            kind, key = "bearer", api_key
        # Strip spaces and tabs only: headers are decoded as Latin-1, where a byte of a UTF-8 letter may be a space.
        key = key.strip(" \t")
        matches = [hmac.compare_digest(key.encode("latin-1"), known) for known in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            problem = "is wrong" if key else "is missing: send the header Authorization: Bearer KEY, or X-Api-Key: KEY"
            header = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, f"the API key {problem}", code="invalid_api_key", headers=header)
        scope[KEY_INDEX] = matches.index(True)

    async def _read(self, body: Body, scope: Scope, receive: Receive) -> None:
        """Read the whole body; ApiError 413 or 408 if it is too large or takes too long.

        Raises ConnectionAbortedError when the client is gone, which then needs no answer.
        """
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit():
            body.check_size(int(announced))
        try:
            async with asyncio.timeout(self.body_seconds):
                is_last = False
                while not is_last:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionAbortedError("the client closed the connection before the end of its request")
                    is_last = not message.get("more_body", False)
                    body.add(message.get("body", b""), is_last=is_last)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.body_seconds:g} seconds") from None
        if body.size > _LARGE and await _is_gone(Request(scope, receive)):
            raise ConnectionAbortedError("the client closed the connection behind its request")


class _Answer:
    """Sends the response to one request, with the request id in its headers.

    seconds: how long the client may take to accept a message. start: the response's first message; None: not sent yet.
    """

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        client_id = Headers(scope=scope).get("x-request-id", "")
        is_valid = client_id.isascii() and client_id.isprintable() and 0 < len(client_id) <= 128
        self.request_id: str = client_id if is_valid else uuid.uuid4().hex
        scope[REQUEST_ID] = self.request_id
        self.start: Message | None = None
        self.is_complete = False
        self._dialect, self._send, self._seconds = dialect_for(scope["path"]), send, seconds

    @property
    def status(self) -> int | None:
        return None if self.start is None else self.start["status"]

    async def send(self, message: Message) -> None:
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        if message["type"] == "http.response.start":
            self.start = message
            for name in ("x-request-id", self._dialect.id_header):
                MutableHeaders(scope=message)[name] = self.request_id
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise ConnectionAbortedError(f"the client read nothing for {self._seconds:g} seconds") from None

    async def end_stream(self, event: str) -> None:
        """End a stream that has begun with an event that reports an error."""
        await self._send({"type": "http.response.body", "body": event.encode()})


class Cors(CORSMiddleware):
    """Starlette's CORS middleware for pages of these origins, with errors in OpenAI's form."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = ApiError(response.status_code, bytes(response.body).decode(), code="cors")
        return JSONResponse(error.body(), error.status)


def _check_framing(scope: Scope) -> None:
    """Refuse a request whose end another program could see elsewhere: what follows would pass as one more request."""
    headers = Headers(scope=scope)
    lengths, codings = headers.getlist("content-length"), headers.getlist("transfer-encoding")
    problem = None
    if lengths and codings:
        problem = "it has both Content-Length and Transfer-Encoding"
    elif len(lengths) > 1:
        problem = f"it has {len(lengths)} headers Content-Length"
    elif codings and (scope["http_version"] == "1.0" or [c.strip().lower() for c in codings] != ["chunked"]):
        problem = f"HTTP/{scope['http_version']} with Transfer-Encoding {', '.join(codings)[:64]!r}"
    elif len(headers.getlist("host")) > 1:
        problem = "it has more than one header Host"
    if problem is not None:
        message = f"the request is ambiguous: {problem}"
        raise ApiError(400, message, code="invalid_http", headers={"Connection": "close"})


async def _is_gone(request: Request) -> bool:
    """Return whether the client has closed the connection. The first question lets the server, which stops reading
    behind a large body, read on to the end of the connection; the second one has the answer."""
    if not await request.is_disconnected():
        await asyncio.sleep(_NOTICE)
    return await request.is_disconnected()


def _is_stream(start: Message, scope: Scope) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith(dialect_for(scope["path"]).media_type)


def _check_content_type(scope: Scope, *, may_be_empty: bool) -> None:
    """Refuse any POST but JSON: browsers let every web page send forms and plain text, JSON only where CORS allows.

    may_be_empty: allow one without a body, as trainers send them, unless it comes from a page.
    """
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if may_be_empty and not content_type and not has_body and "origin" not in headers:
        return
    if scope["method"] == "POST" and content_type != "application/json":
        problem = f"is {content_type}" if content_type else "is missing"
        raise ApiError(415, f"the header Content-Type {problem}: send application/json", code="unsupported_media_type")
