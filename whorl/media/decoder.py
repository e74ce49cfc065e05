"""Decoding in processes of their own: what a stranger's bytes do to a decoder ends with its process.

`child` is the other side. What it says is not trusted: sentences are made here, of numbers; shapes are compared with
what was asked for; what a decoder has to say goes into the log.
"""

import contextlib
import importlib.util
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .child import exactly, read, write
from .errors import DecodeError, MediaError
from .limits import WALL, Limits
from .options import ImageOptions, VideoOptions
from .sizes import MAX_RATIO

_LOG = logging.getLogger("whorl.media")
_START_SECONDS = 60.0  # by the clock, for a new process
_KEPT = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment: to find libraries by


def need_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("pictures need Pillow: pip install 'whorl[vision]'")


def need_av() -> None:
    if importlib.util.find_spec("av") is None:
        raise MediaError(
            "video files need PyAV: pip install 'whorl[video]'; without it a video can be sent as a list of pictures"
        )


class Decoder:
    """One process, started for the first job and kept for the next; a new one where it had to be ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and ending
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def image(self, data: bytes, options: ImageOptions) -> NDArray[np.uint8]:
        """[1, H, W, 3]"""
        return _checked(self._ask("image", [data], options, options)[0], 1)

    def frames(self, parts: Sequence[bytes], options: VideoOptions) -> NDArray[np.uint8]:
        """[F, H, W, 3] of pictures that are a video's frames."""
        return _checked(self._ask("frames", parts, options, options.frames)[0], len(parts))

    def video(self, data: bytes, options: VideoOptions) -> tuple[NDArray[np.uint8], list[int], float]:
        """Frames as `frames` gives them, which of the video's they are, and how many it has in a second."""
        need_av()
        values, about = self._ask("video", [data], options, options.frames)
        indices, fps = about.get("indices"), about.get("fps")
        is_list = isinstance(indices, list) and all(isinstance(i, int) and i >= 0 for i in indices)
        if not is_list or not indices or not isinstance(fps, float) or not 0 < fps < math.inf:
            raise DecodeError("broken")
        return _checked(values, len(indices)), indices, fps

    def _ask(
        self, kind: str, parts: Sequence[bytes], options: Any, sizes: ImageOptions
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        limits = self._limits
        job: dict[str, Any] = {"kind": kind, "sizes": [len(part) for part in parts], "options": asdict(options)}
        job |= {"max_pixels": limits.max_pixels, "max_frames": limits.max_frames}
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with _killed_after(process, WALL * limits.decode_seconds) as has_ended:
                write(process.stdin, job, *parts)
                about = read(process.stdout)
                if "shape" not in about:
                    raise self._refusal(about)
                shape = _shape(about["shape"], sizes)
                data = exactly(process.stdout, math.prod(shape) * 3)
        except (EOFError, OSError, UnicodeError, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            self.end()
            raise self._death(process.returncode, is_late=has_ended.is_set()) from error
        return np.frombuffer(data, np.uint8).reshape(*shape, 3), about

    def _refusal(self, about: dict[str, Any]) -> MediaError:
        code = about.get("code")
        if code == "memory":  # what is left of it is in pieces
            self.end()
        if about.get("detail"):
            _LOG.warning("not decoded (%s): %s", ascii(code), ascii(str(about["detail"]))[:300])
        try:
            return DecodeError(str(code), *(int(number) for number in about["numbers"]))
        except (KeyError, IndexError, TypeError, ValueError):  # no sentence of ours
            self.end()
            return DecodeError("broken")

    def _started(self) -> "subprocess.Popen[bytes]":
        """The process, which is new where the last one has ended."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("media: the decoders are closed")
            if self._process is not None and self._process.poll() is None:
                return self._process
            need_pillow()
            process = self._process = _start()
        assert process.stdin is not None
        assert process.stdout is not None
        setup = {"seconds": self._limits.decode_seconds, "memory": self._limits.decode_memory}
        found: dict[str, Any] = {}
        with _killed_after(process, _START_SECONDS), contextlib.suppress(EOFError, OSError, ValueError):
            write(process.stdin, setup)
            found = read(process.stdout)
        if not found.get("ready"):
            self.end()
            why = found.get("failed") or f"exit code {process.returncode}"
            raise RuntimeError(f"media: the decoder's process did not start: {why}")
        return process

    def end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not written goes nowhere
                stream.close()

    def close(self) -> None:
        """For good: a job that is running ends with an error."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _death(self, code: int, *, is_late: bool) -> Exception:
        if self._is_closed:
            return RuntimeError("media: the decoders are closed")
        _LOG.warning("a decoder ended with code %s%s", code, ", it took too long" if is_late else "")
        if is_late or code == -signal.SIGXCPU:
            return MediaError(f"decoding it takes longer than {self._limits.decode_seconds:g} seconds", "too_costly")
        return DecodeError("broken")


def _shape(found: Any, options: ImageOptions) -> tuple[int, ...]:
    """Frames, height and width; EOFError where they are none that was asked for: the process is not to be trusted."""
    is_shape = isinstance(found, list) and len(found) == 3 and all(isinstance(n, int) and n > 0 for n in found)
    if not is_shape or found[1] % options.factor or found[2] % options.factor:
        raise EOFError
    # Over the limit goes only what is small or narrow, whose sides are rounded up.
    most = max(options.max_pixels, options.min_pixels * 4, options.factor**2 * MAX_RATIO * 4 * found[0])
    if math.prod(found) > most:
        raise EOFError
    return tuple(found)


def _checked(values: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    if len(values) != count:
        raise DecodeError("broken")
    return values


@contextlib.contextmanager
def _killed_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """Ends whatever waits for the process, reading or writing. The event is set if it came to that."""
    has_ended = threading.Event()

    def kill() -> None:
        has_ended.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield has_ended
    finally:
        timer.cancel()


def _start() -> "subprocess.Popen[bytes]":
    """With next to nothing of this process's environment, which may hold secrets, and in a session of its own, so that
    Ctrl-C ends the requests first."""
    places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    settings = {"PYTHONPATH": os.pathsep.join(places), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _KEPT if name in os.environ} | settings,
        start_new_session=True,
    )


class Decoders:
    """Several, for several threads."""

    def __init__(self, limits: Limits, size: int = 2) -> None:
        self._all = [Decoder(limits) for _ in range(size)]
        self._free: queue.LifoQueue[Decoder] = queue.LifoQueue()  # the one used last is warm
        for each in reversed(self._all):
            self._free.put(each)

    @contextlib.contextmanager
    def one(self) -> Iterator[Decoder]:
        """Waits for one that is free."""
        decoder = self._free.get()
        try:
            yield decoder
        finally:
            self._free.put(decoder)

    def close(self) -> None:
        for each in self._all:
            each.close()
        for each in self._all:
            each.end()
