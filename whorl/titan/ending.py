"""End a run cleanly: pass signals on to torchrun, and leave no process behind."""

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

# Sent by Ctrl-C, by a scheduler or systemd, and by a closed terminal. Windows has no SIGHUP.
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL = 0.25  # seconds
GRACE = 45.0  # seconds between the first signal and SIGKILL; torchrun gives its ranks 30
PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> Callable[[], None]:
    """Return a function that asks the kernel to send this process a signal when its parent ends, even by kill -9.

    Only Linux can do that; elsewhere the function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None)  # loaded here, because the function may run between fork and exec

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return request_signal


class Signals:
    """Records the signals that end a run while the context is open; ignored signals (nohup) stay ignored."""

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
    """Start a command in its own session, so that Ctrl-C reaches only this process; it ends when this process ends."""
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent(signal.SIGTERM),  # it makes a single libc call
    )


def wait(process: "subprocess.Popen[str]", update: Callable[[], None], signals: Signals) -> str | None:
    """Wait for a process and return its standard error, or None if a signal ended it; it is over on return."""
    try:
        while not signals.seen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=POLL)[1]
            update()
        return None
    finally:
        end(process, signals)


def end(process: "subprocess.Popen[str]", signals: Signals) -> None:
    """Pass the signal on and wait; kill the process after GRACE seconds or at a second signal."""
    if process.poll() is not None:
        return
    process.send_signal(signals.seen[0] if signals.seen else signal.SIGTERM)
    deadline, count = time.monotonic() + GRACE, len(signals.seen)
    while time.monotonic() < deadline and len(signals.seen) <= count:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=POLL)
            return
    # Its ranks are in other sessions; each has asked the kernel to kill it when torchrun ends.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
