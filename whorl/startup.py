"""What a command shows, and what Ctrl-C does, while it imports: nothing has to be cleaned up yet."""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit code of a process that Ctrl-C ended, as shells report it


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def end_at_once() -> None:
    """Let Ctrl-C end this process in silence, also where a library that imports would print or replace an exception.

    `raise_again` ends that. A handler that is not Python's own stays, and so does an ignored SIGINT, as that of a
    background job in a script.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread, which alone gets signals
            signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: from now on there may be something to clean up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Enclose the imports that take seconds, those of torch: a terminal shows that the command starts."""
    is_shown = "torch" not in sys.modules and sys.stderr.isatty()
    if is_shown:
        print("starting", end="", file=sys.stderr, flush=True)
    end_at_once()
    try:
        yield
    finally:
        raise_again()
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End this process with the code.

    `sys.exit` would end it by SIGINT if a KeyboardInterrupt has passed through the exec() of a dataclass: CPython notes
    it there as one that nobody has handled.
    """
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)
