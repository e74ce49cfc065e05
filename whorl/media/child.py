"""The process that decodes. It has the bytes of one picture or video at a time, and nothing else: no environment, no
file and no socket that it could open, and what it may take of CPU time and memory is limited.

`decoder` starts it and talks to it: a length, JSON and its bytes, both ways.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .errors import DecodeError
from .options import ImageOptions, VideoOptions
from .sizes import image_size

_HEAD = struct.Struct("<Q")
_STREAMS = 3  # standard input, output and errors: all that may be open
_START_SECONDS = 60


def write(stream: IO[bytes], value: Any, *payloads: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(_HEAD.pack(len(data)))
    stream.write(data)
    for payload in payloads:
        stream.write(payload)
    stream.flush()


def read(stream: IO[bytes], most: int = 1 << 20) -> Any:
    """EOFError where the other side has gone."""
    (size,) = _HEAD.unpack(exactly(stream, _HEAD.size))
    if size > most:
        raise EOFError
    return json.loads(exactly(stream, size))


def exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def image_options(given: Mapping[str, Any]) -> ImageOptions:
    return ImageOptions(**(dict(given) | {name: tuple(given[name]) for name in ("mean", "std")}))


def video_options(given: Mapping[str, Any]) -> VideoOptions:
    return VideoOptions(**(dict(given) | {"frames": image_options(given["frames"])}))


def decode(job: Mapping[str, Any], parts: list[bytes]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """[F, H, W, 3], and of a video which frames they are."""
    from .pictures import open_picture, resized, to_rgb
    from .videos import read_frames, read_video

    max_pixels = job["max_pixels"]
    if job["kind"] == "image":
        options = image_options(job["options"])
        image = to_rgb(open_picture(parts[0], max_pixels))
        return resized(image, image_size(image.height, image.width, options), options.resample)[None], {}
    video = video_options(job["options"])
    if job["kind"] == "frames":
        return read_frames(parts, video, max_pixels=max_pixels), {}
    frames, indices, fps = read_video(parts[0], video, max_pixels=max_pixels, max_frames=job["max_frames"])
    return frames, {"indices": indices, "fps": fps}


def answer(job: Mapping[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Any]:
    """What is said, and pixels. What went wrong inside a decoder goes into the log, never to who sent the bytes."""
    try:
        values, about = decode(job, parts)
        return about | {"shape": values.shape[:3]}, np.ascontiguousarray(values).data.cast("B")
    except DecodeError as error:
        return {"code": error.code, "numbers": error.numbers, "detail": error.detail}, b""
    except MemoryError:
        return {"code": "memory", "numbers": []}, b""
    except BaseException as error:
        return {"code": "broken", "numbers": [], "detail": f"{type(error).__name__}: {error}"}, b""


class Fence:
    """Limits of this process, by the system: what goes over them ends the process or fails."""

    def __init__(self) -> None:
        import resource

        self._resource = resource
        self._set(resource.RLIMIT_CORE, 0)

    def allow_seconds(self, seconds: float) -> None:
        """Of CPU time, from now on."""
        usage = self._resource.getrusage(self._resource.RUSAGE_SELF)
        limit = int(usage.ru_utime + usage.ru_stime + seconds) + 1
        self._set(self._resource.RLIMIT_CPU, limit, is_final=False)

    def close(self, memory: int) -> None:
        """Nothing is opened or started from here on; memory: bytes beside what is in use."""
        table = Path("/proc/self/statm")
        if table.exists():  # other systems do not keep this limit
            used = int(table.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            self._set(self._resource.RLIMIT_AS, used + memory)
        self._set(self._resource.RLIMIT_FSIZE, 0)
        self._set(self._resource.RLIMIT_NPROC, 0)
        self._set(self._resource.RLIMIT_NOFILE, _STREAMS)

    def _set(self, what: int, value: int, *, is_final: bool = True) -> None:
        hard = self._resource.getrlimit(what)[1]
        value = value if hard < 0 else min(value, hard)
        self._resource.setrlimit(what, (value, value if is_final else hard))


def _warm_up() -> None:
    """Import what decoding imports late: afterwards no file can be opened."""
    from PIL import Image

    from . import pictures

    importlib.import_module(f"{__package__}.videos")
    for kind in pictures.FORMATS:
        buffer, turned = io.BytesIO(), Image.Exif()
        turned[0x0112] = 6
        Image.new("RGB", (2, 3)).save(buffer, kind, exif=turned)
        pictures.to_rgb(pictures.open_picture(buffer.getvalue(), 6))
    with contextlib.suppress(DecodeError):
        pictures.open_picture(b"nothing", 1)
    if importlib.util.find_spec("av") is not None:
        import av

        for module in pkgutil.walk_packages(av.__path__, "av."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        setup = read(source)
        fence = Fence()
        fence.allow_seconds(_START_SECONDS)
        try:
            _warm_up()
            fence.close(setup["memory"])
        except Exception as error:
            write(sink, {"failed": f"{type(error).__name__}: {error}"})
            return
        write(sink, {"ready": True})
        while True:
            job = read(source)
            parts = [exactly(source, size) for size in job["sizes"]]
            fence.allow_seconds(setup["seconds"])
            write(sink, *answer(job, parts))


if __name__ == "__main__":
    main()
