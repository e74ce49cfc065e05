"""Match the images and videos of a prompt with its placeholder tokens, and compute positions on three axes.

The prompt already contains one placeholder token for each feature of an image. Nothing here touches the engine's state,
so a server may check a request on another thread before it passes it on.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.media import MediaItem
from whorl.positions import multimodal_positions

from .sequence import Content


@dataclass(frozen=True, slots=True, eq=False)
class PlacedMedia:
    """An image or a video and its spans of placeholder tokens: a video has one span for each temporal patch."""

    item: MediaItem
    spans: tuple[range, ...]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop

    @property
    def num_tokens(self) -> int:
        return len(self.spans) * len(self.spans[0])

    def contents(self) -> Iterator[Content]:
        """Yield the contents for the prefix cache: each frame of a video has its own, whatever text is between them."""
        grid = struct.pack("<3qd", *self.item.grid, self.item.interval)
        for frame, span in enumerate(self.spans):
            yield Content(span, self.item.digest + grid + struct.pack("<q", frame))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The media and positions of a whole prompt. delta: position minus index of the tokens after the prompt."""

    items: tuple[PlacedMedia, ...]
    axes: NDArray[np.int64]  # [A, prompt]
    delta: int

    @property
    def contents(self) -> list[Content]:
        return [content for placed in self.items for content in placed.contents()]

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions [A, stop - start] of tokens; after the prompt all axes are the same."""
        prompt = self.axes[:, start:stop]
        generated = np.arange(max(start, self.axes.shape[1]), stop) + self.delta
        return np.concatenate((prompt, np.broadcast_to(generated, (len(prompt), len(generated)))), axis=1)


def place(prompt_ids: Sequence[int], media: Sequence[MediaItem], model: Any, *, most: int) -> Placement | None:
    """Return the placement of a prompt's media; None for text only. ValueError if prompt, media and model do not fit.

    most: features of one image or video that the engine can hold.
    """
    if getattr(model, "tower", None) is None:
        if media:
            raise ValueError(
                f"media: {len(media)} images or videos, expected none, because this model reads text only; load one "
                "with a vision tower, such as Qwen3-VL"
            )
        return None
    config = model.config
    ids = np.asarray(prompt_ids, dtype=np.int64)
    placeholders = {"image": config.image_token_id, "video": config.video_token_id}
    indices = np.flatnonzero(np.isin(ids, list(placeholders.values())))
    items: list[PlacedMedia] = []
    used = 0
    for number, item in enumerate(media):
        _check_item(number, item, config.vision, most)
        items.append(_place(number, item, ids, indices[used:], placeholders, config.vision.spatial_merge_size))
        used += items[-1].num_tokens
    if used < len(indices):
        raise ValueError(
            f"media: {len(media)} images or videos have {used} features, and the prompt has {len(indices)} placeholder "
            f"tokens; the first one left over is token {indices[used]}. Give an item for every run of placeholders"
        )
    return _with_positions(ids, items, model) if items else None


def _check_item(number: int, item: MediaItem, tower: Any, most: int) -> None:
    """Raise ValueError if an item has an unfit digest, grid or patches for the tower, or more than `most` tokens."""
    name, (frames, rows, columns), merge = _name(number, item), item.grid, tower.spatial_merge_size
    Content(range(1), item.digest)  # raises if the digest is too short to tell images apart
    if min(item.grid) < 1 or rows % merge or columns % merge or (item.kind == "image" and frames != 1):
        raise ValueError(
            f"{name}: expected a grid of at least 1, rows and columns in multiples of {merge}, and 1 frame of an image"
        )
    expected = (frames * rows * columns, tower.patch_values)
    if item.patches.shape != expected or item.patches.dtype != np.float32:
        raise ValueError(
            f"{name}: patches are {list(item.patches.shape)} {item.patches.dtype}, expected {list(expected)} float32 "
            "for this grid"
        )
    if (count := tower.num_tokens(item.grid)) > most:
        raise ValueError(
            f"{name}: it has {count} tokens, expected at most {most}; make it smaller, or raise encoder_cache"
        )


def _place(
    number: int,
    item: MediaItem,
    ids: NDArray[np.int64],
    indices: NDArray[np.int64],
    placeholders: dict[str, int],
    merge: int,
) -> PlacedMedia:
    """Take the item's placeholders from the front of `indices`; ValueError if they are not there."""
    size = item.grid[1] * item.grid[2] // merge**2
    spans = []
    for frame in range(item.grid[0]):
        run = indices[frame * size : (frame + 1) * size]
        is_run = len(run) == size and run[-1] - run[0] == size - 1
        if not is_run or (ids[run] != placeholders[item.kind]).any():
            raise ValueError(
                f"{_name(number, item)}: expected {item.grid[0]} runs of {size} placeholder tokens "
                f"{placeholders[item.kind]}, and in place of run {frame} the prompt {_describe_run(ids, run)}; give "
                "items in the order of their placeholders"
            )
        spans.append(range(int(run[0]), int(run[-1]) + 1))
    return PlacedMedia(item, tuple(spans))


def _name(number: int, item: MediaItem) -> str:
    return f"media: item {number} ({item.kind}, grid {'x'.join(map(str, item.grid))})"


def _describe_run(ids: NDArray[np.int64], run: NDArray[np.int64]) -> str:
    if not len(run):
        return "has no placeholders left"
    first = int(run[0])
    is_same = ids[first:] == ids[first]
    length = len(is_same) if is_same.all() else int(is_same.argmin())
    return f"has {length} tokens {ids[first]} from {first} on"


def _with_positions(ids: NDArray[np.int64], items: list[PlacedMedia], model: Any) -> Placement:
    """Return the placement of items whose spans are known, with the positions of all tokens of the prompt."""
    grids = {kind: [placed.item.grid for placed in items if placed.item.kind == kind] for kind in ("image", "video")}
    rule = model.config.position_rule
    intervals = [placed.item.interval for placed in items if placed.item.kind == "video"]
    axes, deltas = multimodal_positions(
        ids,
        rule,
        image_grid_thw=grids["image"] or None,
        video_grid_thw=grids["video"] or None,
        seconds_per_grid=None if rule.tokens_per_second is None else intervals,
        cu_seqlens=[0, len(ids)],
    )
    return Placement(tuple(items), axes, int(deltas[0, 0]))
