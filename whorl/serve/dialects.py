"""In what shape each family of addresses answers: the body of an error, the events of a stream and what ends it."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import Scope

if TYPE_CHECKING:
    from .gate import ApiError

REQUEST_NUMBER = "whorl.request_number"  # in a request's scope, and in its answer's headers


class Dialect:
    """OpenAI's: chat, completions and all addresses that say nothing else."""

    done = "data: [DONE]\n\n"
    number_header = "x-request-id"  # beside this one, which every answer has

    def event(self, chunk: Mapping[str, Any]) -> str:
        return f"data: {_json(chunk)}\n\n"

    def body(self, error: "ApiError", number: str | None) -> dict[str, Any]:
        return error.body()

    def last_event(self, error: "ApiError", number: str | None) -> str:
        """What a stream says that breaks off, and its end."""
        return f"data: {_json(self.body(error, number))}\n\n{self.done}"


class Named(Dialect):
    """Events have names and nothing follows the last one."""

    done = ""

    def event(self, chunk: Mapping[str, Any]) -> str:
        return f"event: {chunk['type']}\ndata: {_json(chunk)}\n\n"

    def last_event(self, error: "ApiError", number: str | None) -> str:
        return self.event(self.body(error, number))


class Responses(Named):
    """OpenAI's newer interface: an error without a stream is the older one's."""

    def last_event(self, error: "ApiError", number: str | None) -> str:
        return self.event(error_event(error, 0))


class Anthropic(Named):
    number_header = "request-id"
    _TYPES: Mapping[int, str] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }

    def body(self, error: "ApiError", number: str | None) -> dict[str, Any]:
        kind = self._TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.body()["error"]["message"]
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": number}


def error_event(error: "ApiError", number: int) -> dict[str, Any]:
    """Of a response. OpenAI's client reads the fields beside the type, and raises where there is `error`."""
    found = error.body()["error"]
    about = {name: found[name] for name in ("code", "message", "param")}
    return {"type": "error", **about, "sequence_number": number, "error": found}


_OPENAI, _RESPONSES, _ANTHROPIC = Dialect(), Responses(), Anthropic()


def dialect_of(path: str) -> Dialect:
    """Of an address."""
    for family, dialect in (("/v1/responses", _RESPONSES), ("/v1/messages", _ANTHROPIC)):
        if path == family or path.startswith(f"{family}/"):
            return dialect
    return _OPENAI


def refusal(error: "ApiError", scope: Scope) -> JSONResponse:
    """The whole answer to a request that is refused."""
    body = dialect_of(scope["path"]).body(error, scope.get(REQUEST_NUMBER))
    return JSONResponse(body, error.status, headers=dict(error.headers or {}))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
