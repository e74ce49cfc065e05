"""How each family of routes formats errors and streams: the body of an error, the events and the end of a stream."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import Scope

if TYPE_CHECKING:
    from .api_error import ApiError

REQUEST_ID = "whorl.request_number"  # in a request's scope: its id, which the response's headers carry too
REASON = "whorl.reason"  # in a request's scope: the message of the error that answered it, for the log


class Dialect:
    """OpenAI's dialect: chat, completions and all routes without a dialect of their own.

    event: the text of one event of a stream; done: the text that ends a stream; body: the JSON of an error response.
    """

    media_type = "text/event-stream"
    done = "data: [DONE]\n\n"
    id_header = "x-request-id"  # a header for the request id beside x-request-id, which every response has

    def event(self, chunk: Mapping[str, Any]) -> str:
        return f"data: {_json(chunk)}\n\n"

    def body(self, error: "ApiError", request_id: str | None) -> dict[str, Any]:
        return error.body()

    def last_event(self, error: "ApiError", request_id: str | None) -> str:
        """Return the event that reports the error, and the end of the stream."""
        return f"data: {_json(self.body(error, request_id))}\n\n{self.done}"


class NamedEvents(Dialect):
    """Events have names, and no marker follows the last one."""

    done = ""

    def event(self, chunk: Mapping[str, Any]) -> str:
        return f"event: {chunk['type']}\ndata: {_json(chunk)}\n\n"

    def last_event(self, error: "ApiError", request_id: str | None) -> str:
        return self.event(self.body(error, request_id))


class Responses(NamedEvents):
    """OpenAI's newer interface. Without a stream, its errors are those of the older one."""

    def last_event(self, error: "ApiError", request_id: str | None) -> str:
        return self.event(error_event(error, 0))


class Anthropic(NamedEvents):
    """Anthropic's interface."""

    id_header = "request-id"
    _TYPES: Mapping[int, str] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }

    def body(self, error: "ApiError", request_id: str | None) -> dict[str, Any]:
        kind = self._TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.body()["error"]["message"]
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class Ollama(Dialect):
    """Ollama's interface: a stream is lines of JSON, and an error is its message."""

    media_type, done = "application/x-ndjson", ""

    def event(self, chunk: Mapping[str, Any]) -> str:
        return f"{_json(chunk)}\n"

    def body(self, error: "ApiError", request_id: str | None) -> dict[str, Any]:
        return {"error": error.body()["error"]["message"]}

    def last_event(self, error: "ApiError", request_id: str | None) -> str:
        return self.event(self.body(error, request_id))


def error_event(error: "ApiError", sequence_number: int) -> dict[str, Any]:
    """Return the `error` event of `/v1/responses`.

    OpenAI's client reads the fields beside the type, and raises an exception when there is a field `error`.
    """
    body = error.body()["error"]
    fields = {name: body[name] for name in ("code", "message", "param")}
    return {"type": "error", **fields, "sequence_number": sequence_number, "error": body}


_OPENAI = Dialect()
_FAMILIES: Mapping[str, Dialect] = {"/v1/responses": Responses(), "/v1/messages": Anthropic(), "/api": Ollama()}


def dialect_for(path: str) -> Dialect:
    """Return the dialect of a path."""
    for family, dialect in _FAMILIES.items():
        if path == family or path.startswith(f"{family}/"):
            return dialect
    return _OPENAI


def error_response(error: "ApiError", scope: Scope) -> JSONResponse:
    """Return the response that reports an error, in the dialect of the request's path."""
    scope[REASON] = error.message
    body = dialect_for(scope["path"]).body(error, scope.get(REQUEST_ID))
    return JSONResponse(body, error.status, headers=dict(error.headers or {}))


def last_event(error: "ApiError", scope: Scope) -> str:
    """Return the events that end a stream with an error, in the dialect of the request's path."""
    scope[REASON] = error.message
    return dialect_for(scope["path"]).last_event(error, scope.get(REQUEST_ID))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
