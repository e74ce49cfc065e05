"""Sizes and times: what a picture is resized to, which frames of a video are sampled, and their times.

The results equal transformers' (models/qwen2_vl and models/qwen3_vl), rounding included: Python's `round` rounds halves
to even.
"""

import math
from collections.abc import Sequence

import numpy as np

from .errors import DecodeError
from .options import ImageOptions, VideoOptions

MAX_RATIO = 200
DEFAULT_FPS = 24.0  # of a video file that does not declare its rate


def image_size(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """Return the height and width that a picture is resized to: multiples of the factor, the area within the limits.

    Raises DecodeError when one side is more than `MAX_RATIO` times the other.
    """
    _check_ratio(height, width)
    return _fit(height, width, 1, 1, options, options.max_pixels)


def video_size(num_frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
    """Return the height and width of each frame; the limits on the area are for all frames together.

    Raises DecodeError for too few frames and for sides that differ too much.
    """
    frames = options.frames
    least, factor = frames.temporal_patch_size, frames.factor
    if num_frames < least:
        raise DecodeError("few_frames", num_frames, least)
    max_pixels = frames.max_pixels
    if options.cap_pixels_per_frame:
        per_frame = min(options.max_video_tokens * factor * factor, frames.max_pixels // num_frames)
        max_pixels = max(per_frame, int(frames.min_pixels * 1.05)) * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(height, width)
    return _fit(height, width, num_frames, round(num_frames / least) * least, frames, max_pixels)


def _fit(height: int, width: int, frames: int, rounded: int, options: ImageOptions, most: int) -> tuple[int, int]:
    """Return the height and width for an area of at most `most` pixels.

    frames, rounded: the number of frames, before and after it is rounded to whole temporal patches.
    """
    factor = options.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rounded * rows * columns > most:
        beta = math.sqrt((frames * height * width) / most)
        rows, columns = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif rounded * rows * columns < options.min_pixels:
        beta = math.sqrt(options.min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return rows, columns


def _check_ratio(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) / min(height, width) > MAX_RATIO:
        raise DecodeError("ratio", width, height, MAX_RATIO)


def frame_indices(total: int, fps: float, options: VideoOptions) -> list[int]:
    """Return the indices of the frames to sample. total, fps: of the video itself."""
    count = min(max(int(total / fps * options.fps), options.min_frames), options.max_frames, total)
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def patch_seconds(indices: Sequence[int], fps: float, temporal_patch_size: int) -> tuple[float, ...]:
    """Return the time of each temporal patch: the mean of the times of its first and last frame.

    An incomplete last patch is filled up with the last frame.
    """
    size = temporal_patch_size
    padded = [*indices, *[indices[-1]] * (-len(indices) % size)]
    times = [index / fps for index in padded]
    return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))
