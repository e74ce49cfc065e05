"""A line in the log for each request, and the request's number in every other line that is written for it."""

import logging
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import Scope

ACCESS = logging.getLogger("whorl.serve.access")
NUMBER: ContextVar[str | None] = ContextVar("whorl_request_number", default=None)


def log_request(scope: Scope, *, status: int | None, seconds: float, number: str, key_name: str | None) -> None:
    """status: None: nobody was answered. What a client wrote is shown as it was sent, so that no line is its own."""
    client = scope.get("client") or ("-", 0)
    path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace")
    shown = path if path.isprintable() else ascii(path)
    whose = "" if key_name is None else f", key {key_name}"
    how = "no answer" if status is None else str(status)
    what = f'{client[0]}:{client[1]} "{scope["method"]} {shown}" {how}'
    ACCESS.info("%s in %.3f s, request %s%s", what, seconds, number, whose)


class Numbered(logging.Filter):
    """Puts the request's number in front of what is logged while it is worked on."""

    def filter(self, record: logging.LogRecord) -> bool:
        number = NUMBER.get()
        if number is not None:
            record.msg, record.args = f"request {number}: {record.getMessage()}", ()
        return True


def number_logs(names: Iterable[str] = ("uvicorn.error", "asyncio", "whorl.serve")) -> None:
    numbered = Numbered()
    for name in names:
        logging.getLogger(name).addFilter(numbered)
