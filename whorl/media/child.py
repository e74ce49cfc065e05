"""The process that decodes pictures and videos in a sandbox.

It gets the bytes of one picture or video at a time and nothing else: no environment, and it cannot open files or
sockets. Its CPU time and memory are limited. `decoder` starts it and talks to it over pipes: a length, JSON, and bytes,
in both directions.
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
_STREAMS = 3  # stdin, stdout and stderr: the only file descriptors that may be open
_START_SECONDS = 60


def write(stream: IO[bytes], value: Any, *payloads: Any) -> None:
    """Send a value as JSON after its length, then the payloads' bytes."""
    data = json.dumps(value).encode()
    stream.write(_HEAD.pack(len(data)))
    stream.write(data)
    for payload in payloads:
        stream.write(payload)
    stream.flush()


def read(stream: IO[bytes], most: int = 1 << 20) -> Any:
    """Receive a value as `write` sends it; raise EOFError when the other side is gone or sends more than `most`."""
    (size,) = _HEAD.unpack(read_exactly(stream, _HEAD.size))
    if size > most:
        raise EOFError
    return json.loads(read_exactly(stream, size))


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Read so many bytes; raise EOFError when there are fewer."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def image_options(fields: Mapping[str, Any]) -> ImageOptions:
    """Build the options from the JSON of a job."""
    return ImageOptions(**(dict(fields) | {name: tuple(fields[name]) for name in ("mean", "std")}))


def video_options(fields: Mapping[str, Any]) -> VideoOptions:
    """Build the options from the JSON of a job."""
    return VideoOptions(**(dict(fields) | {"frames": image_options(fields["frames"])}))


def decode(job: Mapping[str, Any], parts: list[bytes]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """Decode a job; returns the pixels [F, H, W, 3], and for a video file the frames' indices and the fps."""
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


def run_job(job: Mapping[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Any]:
    """Run a job; returns the JSON of the answer and the pixels. `detail` is for the log, not for the client."""
    try:
        if job["kind"] == "count":
            from .pictures import declared

            width, height = declared(parts[0], job["max_pixels"]).size
            return {"pixels": width * height}, b""
        values, result = decode(job, parts)
        return result | {"shape": values.shape[:3]}, np.ascontiguousarray(values).data.cast("B")
    except DecodeError as error:
        return {"code": error.code, "numbers": error.numbers, "detail": error.detail}, b""
    except MemoryError:
        return {"code": "memory", "numbers": []}, b""
    except BaseException as error:
        return {"code": "broken", "numbers": [], "detail": f"{type(error).__name__}: {error}"}, b""


class Fence:
    """Resource limits of this process, which the kernel enforces: exceeding them fails or kills the process."""

    def __init__(self) -> None:
        import resource

        self._resource = resource
        self._set(resource.RLIMIT_CORE, 0)

    def allow_seconds(self, seconds: float) -> None:
        """Allow this much CPU time from now on."""
        usage = self._resource.getrusage(self._resource.RUSAGE_SELF)
        limit = int(usage.ru_utime + usage.ru_stime + seconds) + 1
        self._set(self._resource.RLIMIT_CPU, limit, is_final=False)

    def close(self, memory: int) -> None:
        """Forbid opening files and sockets and starting processes, for good. memory: bytes beyond those in use now."""
        table = Path("/proc/self/statm")
        if table.exists():  # only Linux enforces this limit
            used = int(table.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            self._set(self._resource.RLIMIT_AS, used + memory)
        self._set(self._resource.RLIMIT_FSIZE, 0)
        self._set(self._resource.RLIMIT_NPROC, 0)
        self._set(self._resource.RLIMIT_NOFILE, _STREAMS)

    def _set(self, limit: int, value: int, *, is_final: bool = True) -> None:
        hard = self._resource.getrlimit(limit)[1]
        value = value if hard < 0 else min(value, hard)
        self._resource.setrlimit(limit, (value, value if is_final else hard))


def _warm_up() -> None:
    """Import everything that decoding imports lazily, as no file can be opened afterwards."""
    from PIL import Image

    from . import pictures

    importlib.import_module(f"{__package__}.videos")
    for kind in pictures.FORMATS:
        buffer, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = 6  # an orientation, so that the code that rotates is loaded too
        Image.new("RGB", (2, 3)).save(buffer, kind, exif=exif)
        pictures.to_rgb(pictures.open_picture(buffer.getvalue(), 6))
    with contextlib.suppress(DecodeError):
        pictures.open_picture(b"nothing", 1)
    if importlib.util.find_spec("av") is not None:
        import av

        for module in pkgutil.walk_packages(av.__path__, "av."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def main() -> None:
    """Run jobs until the server closes the pipe."""
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
            parts = [read_exactly(source, size) for size in job["sizes"]]
            fence.allow_seconds(setup["seconds"])
            write(sink, *run_job(job, parts))


if __name__ == "__main__":
    main()
