"""Limits repeated log messages, so that clients cannot fill the disk through the log."""

import logging
import threading
import time
from collections.abc import Iterable


class LogLimit(logging.Filter):
    """Lets `most` messages of each log statement pass in `seconds`; the next one says how many were left out."""

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


def limit_logs(names: Iterable[str] = ("uvicorn.error", "asyncio", "whorl.serve")) -> None:
    """Limit these loggers. The access log, one line for each request, is not limited."""
    limit = LogLimit()
    for name in names:
        logging.getLogger(name).addFilter(limit)
