"""Sizes and times: what a picture is resized to, which frames of a video are sampled, and their times.

The results equal transformers' (models/qwen2_vl, qwen3_vl, glm4v and glm46v), rounding included: Python's `round`
rounds halves to even.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .errors import DecodeError
from .options import ImageOptions, VideoOptions

MAX_RATIO = 200
DEFAULT_FPS = 24.0  # of a video file that does not declare its rate


def image_size(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """Return the height and width that a picture is resized to: multiples of the factor, the area within the limits.

    Raises DecodeError when one side is more than `MAX_RATIO` times the other.
    """
    count = options.frames
    if count > 1:
        height, width = _at_least(height, width, options.factor)
    _check_ratio(height, width)
    return _fit(height, width, count, count, options, options.max_pixels)


def video_size(num_frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
    """Return the height and width of each frame; the limits on the area are for all frames together, or for each.

    Raises DecodeError for too few frames and for sides that differ too much.
    """
    frames = options.frames
    least, factor = frames.temporal_patch_size, frames.factor
    if num_frames < least:
        raise DecodeError("few_frames", num_frames, least)
    if options.area == "frame":
        _check_ratio(height, width)
        return _fit(height, width, 1, 1, frames, _cap_of_frame(num_frames, options))
    max_pixels = frames.max_pixels
    if options.cap_pixels_per_frame:
        per_frame = min(options.max_video_tokens * factor * factor, frames.max_pixels // num_frames)
        max_pixels = max(per_frame, int(frames.min_pixels * 1.05)) * num_frames
    height, width = _at_least(height, width, factor)
    _check_ratio(height, width)
    return _fit(height, width, num_frames, round(num_frames / least) * least, frames, max_pixels)


def _cap_of_frame(num_frames: int, options: VideoOptions) -> int:
    """Return the most pixels of a frame, where each has a limit of its own."""
    frames = options.frames
    if not options.cap_pixels_per_frame:
        return frames.max_pixels
    total = int(options.max_video_tokens * frames.factor * frames.factor * 0.9)
    share = total * frames.temporal_patch_size // num_frames
    return max(min(frames.max_pixels, share), int(frames.min_pixels * 1.05))


def _at_least(height: int, width: int, factor: int) -> tuple[int, int]:
    """Return a size whose sides are at least `factor`, by scaling."""
    if height >= factor and width >= factor:
        return height, width
    scale = max(factor / height, factor / width)
    return int(height * scale), int(width * scale)


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


class Sampled(NamedTuple):
    """The frames that were taken of a video: their indices, and the frames per second and in all of the video."""

    indices: list[int]
    fps: float
    total: int

    def interval(self, temporal_patch_size: int) -> float:
        """Return the seconds between temporal patches, in the mean."""
        return temporal_patch_size / (len(self.indices) / self.total * self.fps)


def frame_indices(total: int, fps: float, options: VideoOptions) -> list[int]:
    """Return the indices of the frames to sample; a frame may be taken twice. total, fps: of the video itself.

    Raises DecodeError where none would be taken.
    """
    if not (indices := _SAMPLINGS[options.sampling](total, fps, options)):
        raise DecodeError("few_frames", total, options.frames.temporal_patch_size)
    return indices


def _ends(total: int, fps: float, options: VideoOptions) -> list[int]:
    """Qwen3-VL: evenly from the first frame to the last."""
    count = min(max(int(total / fps * options.fps), options.min_frames), options.max_frames, total)
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def _steps(total: int, fps: float, options: VideoOptions) -> list[int]:
    """Qwen2-VL: in even steps, whole temporal patches of them."""
    size = options.frames.temporal_patch_size
    most = min(options.max_frames, total) // size * size
    count = math.floor(min(max(total / fps * options.fps, options.min_frames), most, total) / size) * size
    # transformers computes them with torch.arange, in fp32; it may take one more, past the end.
    return (np.arange(count) * (total / max(count, 1))).astype(np.float32).astype(int).tolist()


def _seconds(total: int, fps: float, options: VideoOptions) -> list[int]:
    """GLM-4.1V, GLM-4.5V: `fps` of each second, of long videos as many as of `max_duration` seconds."""
    duration, last = total / fps, total - 1
    if duration <= options.max_duration:
        count = max(math.floor(duration * options.fps), 1)
        return _even([min(last, math.ceil(i * fps / options.fps)) for i in range(count)])
    count = int(options.max_duration * options.fps)
    if count >= total:
        return _even(range(total))
    return _even([min(last, math.ceil(t * fps)) for t in np.linspace(0, duration, count)])


_LONGEST = 2400  # seconds of a video from which GLM-4.6V takes more frames than of a shorter one
_MOST_DYNAMIC = 640


def _dynamic(total: int, fps: float, options: VideoOptions) -> list[int]:
    """GLM-4.6V: the longer the video, the fewer frames of a second."""
    size, duration = options.frames.temporal_patch_size, total / fps
    used = min(duration, _LONGEST)
    rate = 3 if used <= 30 else 1 if used <= 300 else 0.5
    count = min(int(used * rate * size), _MOST_DYNAMIC)
    if total < count:
        return _even(np.linspace(0, total - 1, count, dtype=int).tolist())
    indices: list[int] = []
    second, step = 0.0, 1 / (size * rate)
    for index in range(total):
        if index * (1 / fps) >= second:
            second += step
            indices.append(index)
            if second >= int(duration):
                break
    if indices and len(indices) < count:
        indices = np.linspace(indices[0], indices[-1], count, dtype=int).tolist()
    elif len(indices) > count:
        indices = np.linspace(0, total - 1, count, dtype=int).tolist()
    return _even(indices)


def _even(indices: Iterable[int]) -> list[int]:
    """Return each index once, and the last one twice where their number is odd."""
    once = list(dict.fromkeys(indices))
    return once + once[-1:] * (len(once) % 2)


_SAMPLINGS = {"ends": _ends, "steps": _steps, "seconds": _seconds, "dynamic": _dynamic}


def patch_seconds(
    indices: Sequence[int], fps: float, temporal_patch_size: int, *, first: bool = False
) -> tuple[float, ...]:
    """Return the time of each temporal patch: the mean of the times of its first and last frame.

    An incomplete last patch is filled up with the last frame. first: the time of the first frame instead.
    """
    size = temporal_patch_size
    padded = [*indices, *[indices[-1]] * (-len(indices) % size)]
    times = [index / fps for index in padded]
    if first:
        return tuple(times[::size])
    return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))
