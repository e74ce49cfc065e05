"""The access log, one line for each request, and the request id in every other line that is logged for it."""

import logging
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import Scope

ACCESS = logging.getLogger("whorl.serve.access")
FORMAT = "%(asctime)s %(levelname)s: %(message)s"  # of the whole log
_POLLED = ("/page/stats", "/health", "/metrics")
_OK = 200
_LONGEST_REASON = 300
CURRENT_ID: ContextVar[str | None] = ContextVar("whorl_request_number", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a request. status: None: no response was sent. reason: the message of the error, if it had one."""

    status: int | None
    seconds: float
    request_id: str
    key_name: str | None
    reason: str | None


def log_request(scope: Scope, outcome: Outcome) -> None:
    """Write the access line of a request. A poll that was answered well is logged at the level DEBUG.

    What a client wrote is escaped where it is not printable, so that it cannot forge a line of the log.
    """
    client = scope.get("client") or ("-", 0)
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace")
    line = f'{client[0]}:{client[1]} "{scope["method"]} {_printable(path)}"'
    key = "" if outcome.key_name is None else f", key {outcome.key_name}"
    reason = "" if outcome.reason is None else f": {_printable(outcome.reason[:_LONGEST_REASON])}"
    level = logging.DEBUG if scope["path"] in _POLLED and outcome.status == _OK else logging.INFO
    status = "no answer" if outcome.status is None else str(outcome.status)
    ACCESS.log(level, "%s %s in %.3f s, request %s%s%s", line, status, outcome.seconds, outcome.request_id, key, reason)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


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
