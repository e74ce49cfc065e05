"""Sizes and times: what a picture is resized to, which frames of a video are taken, and when they are.

All of it equals transformers' (models/qwen2_vl and models/qwen3_vl), rounding included: Python's `round` takes halves
to the even side.
"""

import math
from collections.abc import Sequence

import numpy as np

from .errors import DecodeError
from .options import ImageOptions, VideoOptions

MAX_RATIO = 200
DEFAULT_FPS = 24.0  # of a file that does not say


def image_size(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """Height and width that a picture is resized to: multiples of the factor, the area within the limits."""
    _check_ratio(height, width)
    return _fit(height, width, 1, 1, options, options.max_pixels)


def video_size(num_frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
    """Of each frame; the limits are for all of them together."""
    frames = options.frames
    least, factor = frames.temporal_patch_size, frames.factor
    if num_frames < least:
        raise DecodeError("few_frames", num_frames, least)
    max_pixels = frames.max_pixels
    if options.cap_pixels_per_frame:
        each = min(options.max_video_tokens * factor * factor, frames.max_pixels // num_frames)
        max_pixels = max(each, int(frames.min_pixels * 1.05)) * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(height, width)
    return _fit(height, width, num_frames, round(num_frames / least) * least, frames, max_pixels)


def _fit(height: int, width: int, given: int, taken: int, options: ImageOptions, most: int) -> tuple[int, int]:
    """given, taken: frames, before and after they are rounded to whole temporal patches."""
    factor = options.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if taken * rows * columns > most:
        beta = math.sqrt((given * height * width) / most)
        rows, columns = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif taken * rows * columns < options.min_pixels:
        beta = math.sqrt(options.min_pixels / (given * height * width))
        rows, columns = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return rows, columns


def _check_ratio(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) / min(height, width) > MAX_RATIO:
        raise DecodeError("ratio", width, height, MAX_RATIO)


def frame_indices(total: int, fps: float, options: VideoOptions) -> list[int]:
    """Which of a video's frames are taken. fps: of the video itself."""
    count = min(max(int(total / fps * options.fps), options.min_frames), options.max_frames, total)
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def patch_seconds(indices: Sequence[int], fps: float, temporal_patch_size: int) -> tuple[float, ...]:
    """The time of each temporal patch: the mean of its first and last frame; the last frame fills an unfinished one."""
    size = temporal_patch_size
    full = [*indices, *[indices[-1]] * (-len(indices) % size)]
    times = [index / fps for index in full]
    return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))
