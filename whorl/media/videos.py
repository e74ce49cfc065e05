"""Decodes videos to frames with PyAV. Runs only in the child process that `decoder` starts.

Only a few containers and codecs are allowed: FFmpeg has hundreds, and the others are attack surface that no ordinary
client needs.
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
from .sizes import DEFAULT_FPS, Sampled, frame_indices, video_size

_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d")


def read_video(
    data: bytes, options: VideoOptions, *, max_pixels: int, max_frames: int
) -> tuple[NDArray[np.uint8], Sampled]:
    """Return the sampled frames [F, H, W, 3], and which they are."""
    fps, total = _count(data, max_pixels, max_frames)
    frames, indices, num_decoded = _sample(data, fps, total, options, max_pixels)
    if num_decoded < total:  # some packets had no frame: sample again from the frames that there are
        if num_decoded == 0:
            raise DecodeError("broken", detail="no frame")
        total = num_decoded
        frames, indices, _ = _sample(data, fps, total, options, max_pixels)
    return frames, Sampled(indices, fps, total)


def _open(data: bytes) -> Any:
    """Open a video's container; DecodeError if it is neither MP4 nor Matroska (WebM) or has no video stream."""
    import av

    is_matroska, is_mp4 = data[:4] == b"\x1aE\xdf\xa3", data[4:8] == b"ftyp"
    if not is_matroska and not is_mp4:
        raise DecodeError("video_format")
    # The format is fixed, so that FFmpeg does not try other demuxers on the bytes.
    container = av.open(
        io.BytesIO(data),
        format="matroska" if is_matroska else "mp4",
        options={"codec_whitelist": ",".join(_CODECS), "protocol_whitelist": "none"},
    )
    if not container.streams.video:
        raise DecodeError("video_format", detail="no video stream")
    return container


def _count(data: bytes, max_pixels: int, max_frames: int) -> tuple[float, int]:
    """Return the frames per second and the number of packets, without decoding: the header's count may be wrong."""
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


def _sample(
    data: bytes, fps: float, total: int, options: VideoOptions, max_pixels: int
) -> tuple[NDArray[np.uint8], list[int], int]:
    """Return the frames to sample from a video of `total` frames, their indices, and `total`.

    If the video has fewer frames, return no frames, the indices, and the number of frames that it has.
    """
    if total == 0:
        raise DecodeError("broken", detail="no packet")
    indices = frame_indices(total, fps, options)
    selected, num_decoded = set(indices), 0
    out: dict[int, NDArray[np.uint8]] = {}
    size: tuple[int, int] | None = None
    for frame in _frames(data):
        if frame.width * frame.height > max_pixels:  # a stream may change its size midway
            raise DecodeError("pixels", frame.width, frame.height, max_pixels)
        if num_decoded in selected:
            size = size or video_size(len(indices), frame.height, frame.width, options)
            image = Image.fromarray(frame.to_ndarray(format="rgb24"))
            out[num_decoded] = resized(image, size, options.frames.resample)
        num_decoded += 1
        if num_decoded > indices[-1]:
            return np.stack([out[index] for index in indices]), indices, total
    return np.empty((0, 0, 0, 3), np.uint8), indices, num_decoded


def _frames(data: bytes) -> Iterator[Any]:
    """Yield the decoded frames in order, on this thread alone: the process may not start others."""
    with _open(data) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        yield from container.decode(stream)


def read_frames(parts: Sequence[bytes], options: VideoOptions, *, max_pixels: int) -> NDArray[np.uint8]:
    """Decode a video that is sent as a list of pictures; returns [F, H, W, 3]. Their sizes must be equal."""
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
