"""The server's log: one access line for each request, its id in every other line, and limits on repeated messages."""

import logging
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import Scope

from .hosts import is_loopback
from .settings import ServerSettings

_LOG = logging.getLogger("whorl.serve")
ACCESS = logging.getLogger("whorl.serve.access")
_FILTERED = ("uvicorn.error", "asyncio", "whorl.serve")  # loggers; the access log is not limited
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


class LogLimit(logging.Filter):
    """Lets `most` messages of each log statement pass in `seconds`; the next one says how many were left out.

    So clients cannot fill the disk through the log.
    """

    def __init__(self, *, most: int = 10, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # start of the period, messages in it

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno
        with self._lock:
            started, count = self._counts.get(place, (-self._seconds, 0))
            is_over = time.monotonic() - started >= self._seconds
            self._counts[place] = (time.monotonic(), 1) if is_over else (started, count + 1)
        if is_over and count > self._most:
            record.msg = f"{record.getMessage()} ({count - self._most} more like this were left out)"
            record.args = ()
        return is_over or count < self._most


def begin_log(settings: ServerSettings) -> None:
    """Set up the log of a server, and warn when anybody may use it."""
    level = logging.DEBUG if settings.log_level == "trace" else settings.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s: %(message)s")
    filters = (LogLimit(), RequestIdFilter())
    for name in _FILTERED:
        for each in filters:
            logging.getLogger(name).addFilter(each)
    if not is_loopback(settings.host) and not settings.keys:
        _LOG.warning(
            "%s can be reached from other machines and there is no --api-key or --api-key-file: anybody may use it",
            settings.host,
        )
