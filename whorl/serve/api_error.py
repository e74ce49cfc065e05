"""Errors of the API: an HTTP status and OpenAI's error object. This module needs none of the server's libraries."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from whorl.engine.sequence import AllowError, WeightsError

from .engine_thread import EngineError, QueueFull
from .readiness import WarmingUp

_LOG = logging.getLogger("whorl.serve")
_LONGEST_WAIT = 30  # seconds: the largest Retry-After during the warm-up
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error", 503: "server_error"}


class ApiError(Exception):
    """An error that is answered with an HTTP status and OpenAI's error object.

    param: the field of the request that is at fault; code: a machine-readable reason; headers: of the response.
    """

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
    def from_exception(cls, error: BaseException) -> "ApiError":
        """Translate an exception of the engine or of a check into the error that the client receives."""
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
        if isinstance(error, WeightsError):  # not 5xx, after which some clients send a POST again
            return cls(409, str(error), code="weights")
        if isinstance(error, UnicodeError):
            return cls(400, "the text is not valid Unicode")
        if isinstance(error, ValueError | RecursionError):
            return cls(400, str(error))
        _LOG.error("a request failed", exc_info=error)
        return cls(500, f"{type(error).__name__}: see the server's log", code="internal_error")

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # JSON input may contain half a surrogate pair, which cannot be encoded in the response.
        message = self.message.encode("utf-8", "replace").decode()
        param = self.param and self.param.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}
