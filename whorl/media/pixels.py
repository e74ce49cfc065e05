"""The pixels of a picture or video at their final size, their digest, and the patches that a vision tower takes."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .families import DEFAULT
from .item import MediaItem
from .options import ImageOptions

REVISION = 1  # of the code that computes pixels; increase it with every change of the results


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pixels:
    """A decoded and resized picture or video.

    values: [F, H, W, 3] uint8; a picture has one frame. seconds, interval, family: as in `MediaItem`.
    """

    kind: Literal["image", "video"]
    values: NDArray[np.uint8]
    options: ImageOptions
    digest: bytes
    seconds: tuple[float, ...] = ()
    interval: float = 1.0
    family: str = DEFAULT

    @property
    def grid(self) -> tuple[int, int, int]:
        """Temporal patches, rows and columns, counted in patches."""
        frames, height, width, _ = self.values.shape
        size = self.options.patch_size
        return -(-frames // self.options.temporal_patch_size), height // size, width // size

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt, not counting the times of a video, which are text."""
        time, rows, columns = self.grid
        return time * rows * columns // self.options.merge_size**2

    def item(self) -> MediaItem:
        """Compute the patches."""
        return MediaItem(
            kind=self.kind,
            patches=self._patches(),
            grid=self.grid,
            digest=self.digest,
            seconds=self.seconds,
            interval=self.interval,
            family=self.family,
        )

    def _patches(self) -> NDArray[np.float32]:
        """Return [P, V], see `MediaItem`. The last frame is repeated to fill its temporal patch."""
        options, (time, rows, columns) = self.options, self.grid
        merge, size, depth = options.merge_size, options.patch_size, options.temporal_patch_size
        frames = self.values
        if missing := time * depth - len(frames):
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
        split = frames.reshape(time, depth, rows // merge, merge, size, columns // merge, merge, size, 3)
        # The order is time, block row, block column, row, column; then channel, frame, and pixels.
        ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        table = _level_table(options.mean, options.std, options.rescale)
        out = np.empty(ordered.shape, np.float32)
        for channel in range(3):
            out[:, :, :, :, :, channel] = table[channel][ordered[:, :, :, :, :, channel]]
        return out.reshape(time * rows * columns, 3 * depth * size * size)


@functools.lru_cache(maxsize=16)
def _level_table(mean: tuple[float, ...], std: tuple[float, ...], rescale: float) -> NDArray[np.float32]:
    """Return [3, 256] fp32: the number for each level of each channel.

    Rounded where transformers rounds: after the product, which is in fp64, after the difference and after the quotient.
    """
    scaled = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    return (scaled[None] - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


def digest(kind: str, parts: Sequence[bytes], options: Any, **more: Any) -> bytes:
    """Return a hash of the original bytes and of everything else that influences the pixels.

    parts: each is hashed with its length, so that different lists cannot collide. options: a dataclass.
    """
    header = {"kind": kind, "options": asdict(options), "more": more, "revision": REVISION, "libraries": _libraries()}
    sha = hashlib.sha256()
    for part in (json.dumps(header, sort_keys=True).encode(), *parts):
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.digest()


@functools.cache
def _libraries() -> dict[str, str]:
    """Return the versions of the libraries: decoders and filters change between versions."""
    return {name: _version(name) for name in ("pillow", "av", "numpy")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
