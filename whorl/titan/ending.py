"""Start torchrun, wait for it and end it cleanly: pass signals on to it, and leave no process behind."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# The signals that end a run: sent by Ctrl-C, by a scheduler or systemd, and by a closed terminal (not on Windows).
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL = 0.25  # seconds between two looks at the process and at the signals
GRACE = 45.0  # seconds between the first signal and SIGKILL; torchrun gives its ranks 30
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


def end_with_parent(number: int) -> Callable[[], None]:
    """Return a function that asks the kernel for signal `number` when the parent of the calling process ends.

    That also holds when the parent is ended by kill -9. Only Linux can do that; elsewhere the function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None)  # loaded here, because the function may run between fork and exec

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return request_signal


class Signals:
    """A context in which the signals of ENDING do not end this process, but are appended to `seen`.

    Signals that were ignored before, as nohup does with SIGHUP, stay ignored.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)


def start(command: list[str]) -> "subprocess.Popen[str]":
    """Start a command in its own session, so that Ctrl-C in the terminal reaches only this process.

    The command is sent SIGTERM when this process ends. Its standard error is piped, its standard output is discarded.
    """
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent(signal.SIGTERM),  # safe between fork and exec: it makes a single libc call
    )


def wait(process: "subprocess.Popen[str]", update: Callable[[], None], signals: Signals) -> str | None:
    """Wait until a process ends or this process gets a signal, and call `update` every POLL seconds meanwhile.

    Return the standard error of the process, or None after a signal. In both cases the process has ended on return.
    """
    try:
        while not signals.seen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=POLL)[1]
            update()
        return None
    finally:
        end(process, signals)


def end(process: "subprocess.Popen[str]", signals: Signals) -> None:
    """End a process if it still runs: pass the first signal on (SIGTERM if there was none) and wait.

    After GRACE seconds, or at the next signal, the process is killed.
    """
    if process.poll() is not None:
        return
    count = min(len(signals.seen), 1)  # counted before: the next signal may arrive while this one is passed on
    process.send_signal(signals.seen[0] if signals.seen else signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and len(signals.seen) <= count:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=POLL)
            return
    # This kills torchrun. Its ranks are in other sessions; each has asked the kernel to be killed when torchrun ends.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
