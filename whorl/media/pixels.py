"""Pixels of a picture or video at their final size, their name, and the patches that a tower takes."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .item import MediaItem
from .options import ImageOptions

REVISION = 1  # of the code that makes pixels: to be raised with every change of what comes out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pixels:
    """values: [F, H, W, 3] uint8, resized; one frame of a picture. seconds: of each temporal patch of a video."""

    kind: Literal["image", "video"]
    values: NDArray[np.uint8]
    options: ImageOptions
    digest: bytes
    seconds: tuple[float, ...] = ()

    @property
    def grid(self) -> tuple[int, int, int]:
        """Temporal patches, rows and columns, counted in patches."""
        frames, height, width, _ = self.values.shape
        size = self.options.patch_size
        return -(-frames // self.options.temporal_patch_size), height // size, width // size

    @property
    def num_tokens(self) -> int:
        """That stand for it in a prompt; the times of a video, which are text, are not among them."""
        time, rows, columns = self.grid
        return time * rows * columns // self.options.merge_size**2

    def item(self) -> MediaItem:
        return MediaItem(
            kind=self.kind, patches=self._patches(), grid=self.grid, digest=self.digest, seconds=self.seconds
        )

    def _patches(self) -> NDArray[np.float32]:
        """[P, V]: see `MediaItem`. A frame that has none beside it in its temporal patch stands there twice."""
        options, (time, rows, columns) = self.options, self.grid
        merge, size, depth = options.merge_size, options.patch_size, options.temporal_patch_size
        frames = self.values
        if missing := time * depth - len(frames):
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
        cut = frames.reshape(time, depth, rows // merge, merge, size, columns // merge, merge, size, 3)
        # Time, block row, block column, row, column; then channel, frame, and pixels.
        ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        table = _levels(options.mean, options.std, options.rescale)
        out = np.empty(ordered.shape, np.float32)
        for channel in range(3):
            out[:, :, :, :, :, channel] = table[channel][ordered[:, :, :, :, :, channel]]
        return out.reshape(time * rows * columns, 3 * depth * size * size)


@functools.lru_cache(maxsize=16)
def _levels(mean: tuple[float, ...], std: tuple[float, ...], rescale: float) -> NDArray[np.float32]:
    """[3, 256]: what each level of each channel becomes. Rounded where transformers rounds: after the product, which is
    in fp64, after the difference and after the quotient."""
    scaled = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    return (scaled[None] - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


def digest(kind: str, parts: Sequence[bytes], options: Any, **more: Any) -> bytes:
    """Names the pixels: of the bytes as they came and of everything else that decides what becomes of them.

    parts: each goes in with its length, so that no two lists run together. options: a dataclass.
    """
    about = {"kind": kind, "options": asdict(options), "more": more, "revision": REVISION, "libraries": _libraries()}
    name = hashlib.sha256()
    for part in (json.dumps(about, sort_keys=True).encode(), *parts):
        name.update(len(part).to_bytes(8, "little"))
        name.update(part)
    return name.digest()


@functools.cache
def _libraries() -> dict[str, str]:
    """Decoders and filters change between versions."""
    return {name: _version(name) for name in ("pillow", "av", "numpy")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
