"""How a run ends: signals reach torchrun, torchrun's ranks end with it, and nobody is left behind."""

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

# Ctrl-C, a scheduler's or systemd's end, a terminal that is gone. Not SIGHUP on Windows.
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL = 0.25  # seconds
GRACE = 45.0  # seconds after the first signal; torchrun gives its ranks 30
PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> Callable[[], None]:
    """A call that lets the kernel send this process a signal when its parent ends, even by kill -9. Linux has it."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None)  # here: the call may be made between fork and exec

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return ask


class Signals:
    """Those that end a run are noted while this is open; what was ignored before, as by nohup, stays so."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python has handlers nowhere else
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
    """In a session of its own, so that a terminal's Ctrl-C reaches us alone; it ends when we do."""
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent(signal.SIGTERM),  # one call of libc's
    )


def wait(process: "subprocess.Popen[str]", update: Callable[[], None], signals: Signals) -> str | None:
    """What it wrote on standard error; None where a signal ended it. It does not outlive this call."""
    try:
        while not signals.seen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=POLL)[1]
            update()
        return None
    finally:
        end(process, signals)


def end(process: "subprocess.Popen[str]", signals: Signals) -> None:
    """Pass the signal on, wait, and kill what has not ended in time, or at the second signal."""
    if process.poll() is not None:
        return
    process.send_signal(signals.seen[0] if signals.seen else signal.SIGTERM)
    until, count = time.monotonic() + GRACE, len(signals.seen)
    while time.monotonic() < until and len(signals.seen) <= count:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=POLL)
            return
    # Its ranks have sessions of their own; each asked the kernel to be killed with it.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
