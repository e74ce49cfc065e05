"""Decodes in separate processes, so that malicious bytes can harm only the process that decodes them.

`child` is the other side, and its answers are not trusted: error messages are built here from codes and numbers, shapes
are checked against the request, and texts of a decoder go only to the log.
"""

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whorl.extras import how_to_install
from whorl.sandbox import Ending, Sandbox, read, read_exactly, write

from .errors import DecodeError, MediaError
from .limits import Limits
from .options import ImageOptions, VideoOptions
from .sizes import MAX_RATIO, Sampled

_LOG = logging.getLogger("whorl.media")
_MOST_JSON = 1 << 20  # bytes of the JSON of an answer
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


class Decoder(Sandbox):
    """One decoding process. It gets almost none of this process's environment, which may contain secrets."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        environment = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        setup = {"seconds": limits.decode_seconds, "memory": limits.decode_memory}
        super().__init__(f"{__package__}.child", environment, setup, is_quiet=True)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def greet(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        answer: dict[str, Any] = {}
        with contextlib.suppress(EOFError, OSError, ValueError):
            write(stdin, self._setup)
            answer = read(stdout, _MOST_JSON)
        if not answer.get("ready"):
            code = self.end()
            raise RuntimeError(
                f"media: the decoder's process did not start: {answer.get('failed') or f'exit code {code}'}"
            )

    def failure(self, ending: Ending, code: int) -> Exception:
        if ending == "interrupted":
            return MediaError("its client left")
        if ending == "closed":
            return RuntimeError("media: the decoders are closed")
        _LOG.warning("a decoder ended with code %s%s", code, ", it took too long" if ending == "late" else "")
        if ending == "late":
            return MediaError(f"decoding it takes longer than {self._limits.decode_seconds:g} seconds", "too_costly")
        return DecodeError("broken")

    def image(self, data: bytes, options: ImageOptions) -> NDArray[np.uint8]:
        """Decode and resize a picture; returns [1, H, W, 3]. Raises MediaError, as the other methods do."""
        return _check_count(self._ask("image", [data], options, options)[0], 1)

    def frames(self, parts: Sequence[bytes], options: VideoOptions) -> NDArray[np.uint8]:
        """Decode and resize pictures that are the frames of a video; returns [F, H, W, 3]."""
        return _check_count(self._ask("frames", parts, options, options.frames)[0], len(parts))

    def video(self, data: bytes, options: VideoOptions) -> tuple[NDArray[np.uint8], Sampled]:
        """Decode a video file; returns the sampled frames [F, H, W, 3], and which they are."""
        need_av()
        values, result = self._ask("video", [data], options, options.frames)
        indices, fps, total = result.get("indices"), result.get("fps"), result.get("total")
        is_list = isinstance(indices, list) and all(isinstance(i, int) and i >= 0 for i in indices)
        if not is_list or not indices or not isinstance(fps, float) or not 0 < fps < math.inf:
            raise DecodeError("broken")
        if not isinstance(total, int) or total <= max(indices):
            raise DecodeError("broken")
        return _check_count(values, len(indices)), Sampled(indices, fps, total)

    def count_pixels(self, data: bytes) -> int:
        """Return the number of pixels that a picture declares."""

        def read_count(result: dict[str, Any], _: IO[bytes]) -> int:
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

        # A picture's limit may be for several frames of it, a video's for each of its frames.
        most = sizes.max_pixels
        if isinstance(options, VideoOptions) and options.area == "frame":
            most *= options.max_frames

        def read_pixels(result: dict[str, Any], stdout: IO[bytes]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
            shape = _shape(result["shape"], sizes, most)
            data = read_exactly(stdout, math.prod(shape) * 3)
            return np.frombuffer(data, np.uint8).reshape(*shape, 3), result

        job = {"kind": kind, "options": asdict(options), "max_frames": self._limits.max_frames}
        return self._call(job, parts, "shape", read_pixels)

    def _call(
        self,
        job: Mapping[str, Any],
        parts: Sequence[bytes],
        key: str,
        read_rest: Callable[[dict[str, Any], IO[bytes]], _T],
    ) -> _T:
        """Run a job in the process. key: of the JSON of an answer that is no refusal, which read_rest then reads."""

        def exchange(stdin: IO[bytes], stdout: IO[bytes]) -> tuple[dict[str, Any], list[_T]]:
            sizes = {"sizes": [len(part) for part in parts], "max_pixels": self._limits.max_pixels}
            write(stdin, {**job, **sizes}, *parts)
            result = read(stdout, _MOST_JSON)
            return result, [read_rest(result, stdout)] if key in result else []

        if self.pid is None:
            need_pillow()
        result, rest = self.run(exchange)
        if not rest:
            raise self._refusal(result)
        return rest[0]

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


def _shape(shape: Any, options: ImageOptions, max_pixels: int) -> tuple[int, ...]:
    """Check frames, height and width of a result; EOFError if they cannot be right: the process is not trusted.

    max_pixels: of all frames together.
    """
    is_shape = isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape)
    if not is_shape or shape[1] % options.factor or shape[2] % options.factor:
        raise EOFError
    # Only small or narrow pictures, whose sides are rounded up, may exceed max_pixels.
    most = max(max_pixels, options.min_pixels * 4, options.factor**2 * MAX_RATIO * 4 * shape[0])
    if math.prod(shape) > most:
        raise EOFError
    return tuple(shape)


def _check_count(values: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    if len(values) != count:
        raise DecodeError("broken")
    return values
