"""Videos to frames, by PyAV. Runs in the child process that `decoder` starts, and nowhere else.

Few containers and few codecs: FFmpeg knows hundreds, most of which nobody sends who means well.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .errors import DecodeError
from .options import VideoOptions
from .pictures import open_picture, resized, to_rgb
from .sizes import DEFAULT_FPS, frame_indices, video_size

_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d")


def read_video(
    data: bytes, options: VideoOptions, *, max_pixels: int, max_frames: int
) -> tuple[NDArray[np.uint8], list[int], float]:
    """[F, H, W, 3] of the frames that are taken, which they are, and how many the file has in a second."""
    fps, total = _count(data, max_pixels, max_frames)
    frames, indices, found = _take(data, fps, total, options, max_pixels)
    if found < total:  # some packets show nothing: what there is to choose from is known now
        if found == 0:
            raise DecodeError("broken", detail="no frame")
        frames, indices, _ = _take(data, fps, found, options, max_pixels)
    return frames, indices, fps


def _open(data: bytes) -> Any:
    import av

    is_matroska, is_mp4 = data[:4] == b"\x1aE\xdf\xa3", data[4:8] == b"ftyp"
    if not is_matroska and not is_mp4:
        raise DecodeError("video_format")
    # Named, so that no other demuxer looks at the bytes.
    container = av.open(
        io.BytesIO(data),
        format="matroska" if is_matroska else "mp4",
        options={"codec_whitelist": ",".join(_CODECS), "protocol_whitelist": "none"},
    )
    if not container.streams.video:
        raise DecodeError("video_format", detail="no video stream")
    return container


def _count(data: bytes, max_pixels: int, max_frames: int) -> tuple[float, int]:
    """Frames a second and in all, without decoding any: the number in the header may be absent, or a lie."""
    with _open(data) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        if context is None or context.name not in _CODECS:
            raise DecodeError("video_format", detail=f"codec {context and context.name}")
        if context.width * context.height > max_pixels:
            raise DecodeError("pixels", context.width, context.height, max_pixels)
        fps = float(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
        total = 0
        for packet in container.demux(stream):
            total += packet.size > 0
            if total > max_frames:
                raise DecodeError("frames", max_frames)
    return fps if 0 < fps < float("inf") else DEFAULT_FPS, total


def _take(
    data: bytes, fps: float, total: int, options: VideoOptions, max_pixels: int
) -> tuple[NDArray[np.uint8], list[int], int]:
    """The frames that are taken if the video has `total`, and how many there were up to the last of them."""
    if total == 0:
        raise DecodeError("broken", detail="no packet")
    indices = frame_indices(total, fps, options)
    wanted, found = set(indices), 0
    out: list[NDArray[np.uint8]] = []
    size: tuple[int, int] | None = None
    for frame in _frames(data):
        if frame.width * frame.height > max_pixels:  # a stream may change its size
            raise DecodeError("pixels", frame.width, frame.height, max_pixels)
        if found in wanted:
            size = size or video_size(len(indices), frame.height, frame.width, options)
            image = Image.fromarray(frame.to_ndarray(format="rgb24"))
            out.append(resized(image, size, options.frames.resample))
        found += 1
        if found > indices[-1]:
            return np.stack(out), indices, total
    return np.empty((0, 0, 0, 3), np.uint8), indices, found


def _frames(data: bytes) -> Iterator[Any]:
    with _open(data) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        yield from container.decode(stream)


def read_frames(parts: Sequence[bytes], options: VideoOptions, *, max_pixels: int) -> NDArray[np.uint8]:
    """[F, H, W, 3] of frames that come as pictures."""
    size: tuple[int, int] | None = None
    first: tuple[int, int] | None = None
    out = []
    for part in parts:
        image = to_rgb(open_picture(part, max_pixels))
        if first is not None and image.size != first:
            raise DecodeError("sizes_differ")
        first = image.size
        size = size or video_size(len(parts), image.height, image.width, options)
        out.append(resized(image, size, options.frames.resample))
    return np.stack(out)
