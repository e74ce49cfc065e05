"""The access log, one line for each request, and the request id in every other line that is logged for it."""

import logging
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import Scope

ACCESS = logging.getLogger("whorl.serve.access")
CURRENT_ID: ContextVar[str | None] = ContextVar("whorl_request_number", default=None)


def log_request(scope: Scope, *, status: int | None, seconds: float, request_id: str, key_name: str | None) -> None:
    """Write the access line of a request. status: None: no response was sent.

    The path is escaped where it is not printable, so that a client cannot forge a line of the log.
    """
    client = scope.get("client") or ("-", 0)
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace")
    shown = path if path.isprintable() else ascii(path)
    key = "" if key_name is None else f", key {key_name}"
    outcome = "no answer" if status is None else str(status)
    line = f'{client[0]}:{client[1]} "{scope["method"]} {shown}" {outcome}'
    ACCESS.info("%s in %.3f s, request %s%s", line, seconds, request_id, key)


class RequestIdFilter(logging.Filter):
    """Puts the request id in front of every message that is logged while the request is handled."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = CURRENT_ID.get()
        if request_id is not None:
            record.msg, record.args = f"request {request_id}: {record.getMessage()}", ()
        return True


def add_request_ids(names: Iterable[str] = ("uvicorn.error", "asyncio", "whorl.serve")) -> None:
    """Add the filter to these loggers."""
    request_ids = RequestIdFilter()
    for name in names:
        logging.getLogger(name).addFilter(request_ids)
