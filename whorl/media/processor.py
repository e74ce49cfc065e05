"""Turns the bytes of pictures and videos into `Pixels`; media from every source pass through here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import LifoQueue

import numpy as np
from numpy.typing import NDArray

from whorl.sandbox import close_all

from .decoder import Decoder, need_pillow
from .errors import MediaError
from .families import FAMILIES
from .limits import Limits
from .options import ImageOptions, Options, VideoOptions, read_options
from .pixels import Pixels, digest
from .sizes import Sampled, frame_indices, patch_seconds

LOW_DETAIL = 512 * 512  # pixels: OpenAI's limit for a picture with detail = "low"


class Processor:
    """Decodes and resizes media for one model. Thread-safe; `close` ends its processes.

    options: the model's preprocessing. num_processes: how many media are decoded at the same time. All methods that
    decode raise MediaError for media that are refused. Their argument decoder is one of `decoders` that the caller uses
    alone; None: the next free one.

    Example: `item = Processor.from_folder(folder).image(Path("cat.png").read_bytes()).item()`.
    """

    def __init__(self, options: Options, limits: Limits | None = None, *, num_processes: int = 3) -> None:
        self.options, self.limits = options, limits or Limits()
        self.decoders = [Decoder(self.limits) for _ in range(num_processes)]
        self._free: LifoQueue[Decoder] = LifoQueue()  # the decoder used last is warm
        for decoder in reversed(self.decoders):
            self._free.put(decoder)

    @classmethod
    def from_folder(
        cls, folder: str | Path, limits: Limits | None = None, *, num_processes: int = 3
    ) -> "Processor | None":
        """Build the processor of the model in a folder; None if the model takes no pictures.

        Raises ValueError when the model's files are invalid or Pillow is not installed.
        """
        options = read_options(folder) if Path(folder).is_dir() else None
        if options is None:
            return None
        need_pillow()
        return cls(options, limits, num_processes=num_processes)

    @property
    def merge_size(self) -> int:
        return self.options.image.merge_size

    @property
    def family(self) -> str:
        """The model's family, a key of `whorl.media.families.FAMILIES`."""
        return self.options.family

    def close(self) -> None:
        close_all(self.decoders)

    def count_pixels(self, data: bytes, *, decoder: Decoder | None = None) -> int:
        """Return the number of pixels that a picture declares, without decoding it."""
        self._check_bytes(data)
        with self._use(decoder) as decoder:
            return decoder.count_pixels(data)

    def image(self, data: bytes, *, is_low: bool = False, decoder: Decoder | None = None) -> Pixels:
        """Decode a picture. is_low: resize it to at most `LOW_DETAIL` pixels."""
        self._check_bytes(data)
        options = self._image_options(is_low)
        with self._use(decoder) as decoder:
            values = decoder.image(data, options)
        name = digest("image", [data], options)
        return Pixels(kind="image", values=values, options=options, digest=name, family=self.family)

    def video(self, data: bytes, *, decoder: Decoder | None = None) -> Pixels:
        """Decode a video file and sample its frames."""
        self._check_bytes(data)
        options = self._video_options()
        with self._use(decoder) as decoder:
            values, sampled = decoder.video(data, options)
        name = digest("video", [data], options, max_frames=self.limits.max_frames)
        return self._video_pixels(values, sampled, name)

    def frames(self, parts: Sequence[bytes], *, fps: float | None = None, decoder: Decoder | None = None) -> Pixels:
        """Decode a video that is a list of pictures. fps: their rate; None: they are sampled at the model's rate."""
        options = self._video_options()
        if len(parts) > self.limits.max_frames:
            raise MediaError(f"it has {len(parts)} frames; up to {self.limits.max_frames} are allowed", "too_large")
        if fps is not None and not 0 < fps <= 1e6:
            raise MediaError(f"the video's fps is {fps:g}, expected more than 0")
        self._check_bytes(*parts)
        rate = options.fps if fps is None else fps
        sampled = Sampled(frame_indices(len(parts), rate, options), rate, len(parts))
        with self._use(decoder) as decoder:
            values = decoder.frames([parts[index] for index in sampled.indices], options)
        return self._video_pixels(values, sampled, digest("frames", parts, options, fps=rate))

    def _video_pixels(self, values: NDArray[np.uint8], sampled: Sampled, name: bytes) -> Pixels:
        options, size = self._video_options(), self._video_options().frames.temporal_patch_size
        is_first = FAMILIES[self.family].time == "first"
        return Pixels(
            kind="video",
            values=values,
            options=options.frames,
            digest=name,
            seconds=patch_seconds(sampled.indices, sampled.fps, size, first=is_first),
            interval=sampled.interval(size),
            family=self.family,
        )

    @contextmanager
    def _use(self, decoder: Decoder | None) -> Iterator[Decoder]:
        """Yield the decoder; None: wait for a free one, and give it back at the end."""
        mine = decoder or self._free.get()
        try:
            yield mine
        finally:
            if decoder is None:
                self._free.put(mine)

    def _check_bytes(self, *parts: bytes) -> None:
        size = sum(map(len, parts))
        if not parts or not all(parts):
            raise MediaError("it is empty")
        if size > self.limits.max_bytes:
            raise MediaError(f"it has {size} bytes; up to {self.limits.max_bytes} are allowed", "too_large")

    def _image_options(self, is_low: bool) -> ImageOptions:
        options = self.options.image
        if not is_low:
            return options
        return replace(options, max_pixels=max(min(options.max_pixels, LOW_DETAIL), options.min_pixels))

    def _video_options(self) -> VideoOptions:
        if self.options.video is None:
            raise MediaError("this model takes no videos: its folder has no video_preprocessor_config.json")
        return self.options.video
