"""Decodes in separate processes, so that malicious bytes can harm only the process that decodes them.

`child` is the other side, and its answers are not trusted: error messages are built here from codes and numbers, shapes
are checked against the request, and texts of a decoder go only to the log.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whorl.extras import how_to_install

from .child import read, read_exactly, write
from .errors import DecodeError, MediaError
from .limits import WALL, Limits
from .options import ImageOptions, VideoOptions
from .sizes import MAX_RATIO

_LOG = logging.getLogger("whorl.media")
_START_SECONDS = 60.0  # wall-clock time to start a process
_T = TypeVar("_T")
_PASSED_VARIABLES = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment, to find libraries


def need_pillow() -> None:
    """Raise ValueError when Pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(f"pictures need Pillow: {how_to_install('vision')}")


def need_av() -> None:
    """Raise MediaError when PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        raise MediaError(
            f"video files need PyAV: {how_to_install('video')}; without it a video can be sent as a list of pictures"
        )


class Decoder:
    """One decoding process, started for the first job and reused for the next ones; replaced if it had to be killed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held while the process is started or taken out of use
        self._is_closed = self._is_asking = self._is_interrupted = False

    def start(self) -> None:
        """Start the process, if there is none."""
        self._ensure_started()

    def interrupt(self) -> None:
        """End the job in progress, if there is one, with a MediaError."""
        with self._lock:
            if self._is_asking and self._process is not None:
                self._is_interrupted = True
                self._process.kill()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def image(self, data: bytes, options: ImageOptions) -> NDArray[np.uint8]:
        """Decode and resize a picture; returns [1, H, W, 3]. Raises MediaError, as the other methods do."""
        return _check_count(self._ask("image", [data], options, options)[0], 1)

    def frames(self, parts: Sequence[bytes], options: VideoOptions) -> NDArray[np.uint8]:
        """Decode and resize pictures that are the frames of a video; returns [F, H, W, 3]."""
        return _check_count(self._ask("frames", parts, options, options.frames)[0], len(parts))

    def video(self, data: bytes, options: VideoOptions) -> tuple[NDArray[np.uint8], list[int], float]:
        """Decode a video file; returns the sampled frames [F, H, W, 3], their indices, and the video's fps."""
        need_av()
        values, result = self._ask("video", [data], options, options.frames)
        indices, fps = result.get("indices"), result.get("fps")
        is_list = isinstance(indices, list) and all(isinstance(i, int) and i >= 0 for i in indices)
        if not is_list or not indices or not isinstance(fps, float) or not 0 < fps < math.inf:
            raise DecodeError("broken")
        return _check_count(values, len(indices)), indices, fps

    def count_pixels(self, data: bytes) -> int:
        """Return the number of pixels that a picture declares."""

        def read_count(result: dict[str, Any]) -> int:
            count = result["pixels"]
            if not isinstance(count, int) or not 0 < count <= self._limits.max_pixels:
                raise EOFError
            return count

        return self._call({"kind": "count"}, [data], "pixels", read_count)

    def _ask(
        self, kind: str, parts: Sequence[bytes], options: Any, sizes: ImageOptions
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Decode in the process; return pixels [F, H, W, 3] and the JSON of the answer. Raises MediaError.

        kind: image, frames or video. parts: the bytes. sizes: the options that limit the size of a frame.
        """

        def read_pixels(result: dict[str, Any]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
            shape = _shape(result["shape"], sizes)
            assert self._process is not None
            assert self._process.stdout is not None
            data = read_exactly(self._process.stdout, math.prod(shape) * 3)
            return np.frombuffer(data, np.uint8).reshape(*shape, 3), result

        job = {"kind": kind, "options": asdict(options), "max_frames": self._limits.max_frames}
        return self._call(job, parts, "shape", read_pixels)

    def _call(
        self, job: Mapping[str, Any], parts: Sequence[bytes], key: str, read_rest: Callable[[dict[str, Any]], _T]
    ) -> _T:
        """Run a job in the process. key: of the JSON of an answer that is no refusal, which read_rest then reads."""
        limits = self._limits
        process = self._ensure_started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._is_asking = True
        try:
            with killed_after(process, WALL * limits.decode_seconds) as was_killed:
                sizes = {"sizes": [len(part) for part in parts], "max_pixels": limits.max_pixels}
                write(process.stdin, {**job, **sizes}, *parts)
                result = read(process.stdout)
                if key not in result:
                    raise self._refusal(result)
                return read_rest(result)
        except (EOFError, OSError, UnicodeError, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            was_interrupted = self._is_interrupted
            self.end()
            if was_interrupted:
                raise MediaError("its client left") from None
            raise self._death(process.returncode, is_late=was_killed.is_set()) from error
        finally:
            self._is_asking = False
            if self._is_interrupted:  # perhaps after the answer was read
                self.end()

    def _refusal(self, result: dict[str, Any]) -> MediaError:
        """Return the error for an answer that has a code instead of pixels; its detail goes to the log."""
        code = result.get("code")
        if code == "memory":  # after a failed allocation the process may be in a bad state
            self.end()
        if result.get("detail"):
            _LOG.warning("not decoded (%s): %s", ascii(code), ascii(str(result["detail"]))[:300])
        try:
            return DecodeError(str(code), *(int(number) for number in result["numbers"]))
        except (KeyError, IndexError, TypeError, ValueError):  # the code or its numbers are not ours
            self.end()
            return DecodeError("broken")

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        """Return the running process; start a new one if the last one has ended."""
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
        answer: dict[str, Any] = {}
        with killed_after(process, _START_SECONDS), contextlib.suppress(EOFError, OSError, ValueError):
            write(process.stdin, setup)
            answer = read(process.stdout)
        if not answer.get("ready"):
            self.end()
            reason = answer.get("failed") or f"exit code {process.returncode}"
            raise RuntimeError(f"media: the decoder's process did not start: {reason}")
        return process

    def end(self) -> None:
        """Kill the process and wait for its end; the next job starts a new one."""
        with self._lock:
            process, self._process, self._is_interrupted = self._process, None, False
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # closing flushes, and the process no longer reads
                stream.close()

    def close(self) -> None:
        """Kill the process for good: a running job ends with an error, and no new process is started."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _death(self, code: int, *, is_late: bool) -> Exception:
        """Return the error that explains the process's exit code."""
        if self._is_closed:
            return RuntimeError("media: the decoders are closed")
        _LOG.warning("a decoder ended with code %s%s", code, ", it took too long" if is_late else "")
        if is_late or code == -signal.SIGXCPU:
            return MediaError(f"decoding it takes longer than {self._limits.decode_seconds:g} seconds", "too_costly")
        return DecodeError("broken")


def _shape(shape: Any, options: ImageOptions) -> tuple[int, ...]:
    """Check frames, height and width of a result; EOFError if they cannot be right: the process is not trusted."""
    is_shape = isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape)
    if not is_shape or shape[1] % options.factor or shape[2] % options.factor:
        raise EOFError
    # Only small or narrow pictures, whose sides are rounded up, may exceed max_pixels.
    most = max(options.max_pixels, options.min_pixels * 4, options.factor**2 * MAX_RATIO * 4 * shape[0])
    if math.prod(shape) > most:
        raise EOFError
    return tuple(shape)


def _check_count(values: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    if len(values) != count:
        raise DecodeError("broken")
    return values


@contextlib.contextmanager
def killed_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """Kill the process after so many seconds, which ends any read or write that waits for it.

    Yields an event that is set if the process was killed.
    """
    was_killed = threading.Event()

    def kill() -> None:
        was_killed.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield was_killed
    finally:
        timer.cancel()


def _start() -> "subprocess.Popen[bytes]":
    """Start a decoding process.

    It gets almost none of this process's environment, which may contain secrets, and its own session, so that Ctrl-C
    reaches the server alone and requests end first.
    """
    paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ} | variables,
        start_new_session=True,
    )


class Decoders:
    """A pool of decoders for several threads."""

    def __init__(self, limits: Limits, size: int = 2) -> None:
        self.all = [Decoder(limits) for _ in range(size)]
        self._free: queue.LifoQueue[Decoder] = queue.LifoQueue()  # the decoder used last is warm
        for decoder in reversed(self.all):
            self._free.put(decoder)

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Decoder]:
        """Wait for a free decoder, and give it back at the end."""
        decoder = self._free.get()
        try:
            yield decoder
        finally:
            self._free.put(decoder)

    def close(self) -> None:
        for decoder in self.all:
            decoder.close()
        for decoder in self.all:
            decoder.end()
