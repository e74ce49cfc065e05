"""The process that decodes pictures and videos in a sandbox.

It gets the bytes of one picture or video at a time and nothing else: no environment, and it cannot open files or
sockets. Its CPU time and memory are limited. `decoder` starts it and talks to it.
"""

import contextlib
import importlib
import importlib.util
import io
import pkgutil
import signal
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.sandbox import START_SECONDS, Fence, read, read_exactly, write

from .errors import DecodeError
from .options import ImageOptions, VideoOptions
from .sizes import image_size


def image_options(fields: Mapping[str, Any]) -> ImageOptions:
    """Build the options from the JSON of a job."""
    return ImageOptions(**(dict(fields) | {name: tuple(fields[name]) for name in ("mean", "std")}))


def video_options(fields: Mapping[str, Any]) -> VideoOptions:
    """Build the options from the JSON of a job."""
    return VideoOptions(**(dict(fields) | {"frames": image_options(fields["frames"])}))


def decode(job: Mapping[str, Any], parts: list[bytes]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """Decode a job; returns the pixels [F, H, W, 3], and for a video file the fields of `Sampled`."""
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
    frames, sampled = read_video(parts[0], video, max_pixels=max_pixels, max_frames=job["max_frames"])
    return frames, sampled._asdict()


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
        fence = Fence(setup["seconds"], setup["memory"])
        fence.allow_seconds(START_SECONDS)
        try:
            _warm_up()
            fence.limit_memory()
            fence.close()
        except Exception as error:
            write(sink, {"failed": f"{type(error).__name__}: {error}"})
            return
        write(sink, {"ready": True})
        while True:
            job = read(source)
            parts = [read_exactly(source, size) for size in job["sizes"]]
            fence.allow_seconds()
            write(sink, *run_job(job, parts))


if __name__ == "__main__":
    main()
