"""Where the pictures and videos of a prompt stand among its tokens, and where on three axes its tokens are.

Whoever made the prompt has put as many placeholder tokens into it as a picture has features. Nothing here touches the
engine: a server may ask before it hands a request over.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.media import MediaItem
from whorl.positions import multimodal_positions

from .contents import Content


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A picture, or a video, whose temporal patches have a span of tokens each."""

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
        """For the prefix cache: frames of a video have a name each, whatever stands between them."""
        grid = struct.pack("<3q", *self.item.grid)
        for frame, span in enumerate(self.spans):
            yield Content(span, self.item.digest + grid + struct.pack("<q", frame))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Of a whole prompt. delta: what is added to the index of a token behind it."""

    items: tuple[Placed, ...]
    axes: NDArray[np.int64]  # [A, prompt]
    delta: int

    @property
    def contents(self) -> list[Content]:
        return [content for placed in self.items for content in placed.contents()]

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """[A, stop - start]; behind the prompt all axes are the same."""
        prompt = self.axes[:, start:stop]
        behind = np.arange(max(start, self.axes.shape[1]), stop) + self.delta
        return np.concatenate((prompt, np.broadcast_to(behind, (len(prompt), len(behind)))), axis=1)


def place(prompt_ids: Sequence[int], media: Sequence[MediaItem], model: Any, *, most: int) -> Placement | None:
    """None for a prompt of text alone; ValueError where prompt, media and model do not go together.

    most: features of one picture or video that the engine can hold.
    """
    if getattr(model, "tower", None) is None:
        if media:
            raise ValueError(
                f"media: {len(media)} pictures or videos were given, and this model reads text alone: "
                "load one that has a vision tower, such as Qwen3-VL"
            )
        return None
    config = model.config
    ids = np.asarray(prompt_ids, dtype=np.int64)
    placeholders = {"image": config.image_token_id, "video": config.video_token_id}
    at = np.flatnonzero(np.isin(ids, list(placeholders.values())))
    items: list[Placed] = []
    used = 0
    for number, item in enumerate(media):
        _check_item(number, item, config.vision, most)
        items.append(_place(number, item, ids, at[used:], placeholders, config.vision.spatial_merge_size))
        used += items[-1].num_tokens
    if used < len(at):
        raise ValueError(
            f"media: {len(media)} pictures or videos have {used} features, and the prompt has {len(at)} placeholder "
            f"tokens; the first that is left over is at {at[used]}: give as many items as the prompt shows, each with "
            "the placeholders of its grid"
        )
    return _number(ids, items, model) if items else None


def _check_item(number: int, item: MediaItem, tower: Any, most: int) -> None:
    what, (frames, rows, columns), merge = _name(number, item), item.grid, tower.spatial_merge_size
    Content(range(1), item.digest)  # refuses one that is too short to tell pictures apart
    if min(item.grid) < 1 or rows % merge or columns % merge or (item.kind == "image" and frames != 1):
        raise ValueError(
            f"{what}: expected 1 or more of each, rows and columns in multiples of {merge}, and of an image one frame"
        )
    expected = (frames * rows * columns, tower.patch_values)
    if item.patches.shape != expected or item.patches.dtype != np.float32:
        raise ValueError(
            f"{what} has patches of {list(item.patches.shape)} {item.patches.dtype}, and its grid calls for "
            f"{list(expected)} float32"
        )
    if (count := tower.num_tokens(item.grid)) > most:
        raise ValueError(
            f"{what} has {count} tokens, and at most {most} are held (encoder_cache): make it smaller, or hold more"
        )


def _place(
    number: int,
    item: MediaItem,
    ids: NDArray[np.int64],
    at: NDArray[np.int64],
    placeholders: dict[str, int],
    merge: int,
) -> Placed:
    size = item.grid[1] * item.grid[2] // merge**2
    spans = []
    for frame in range(item.grid[0]):
        run = at[frame * size : (frame + 1) * size]
        is_run = len(run) == size and run[-1] - run[0] == size - 1
        if not is_run or (ids[run] != placeholders[item.kind]).any():
            raise ValueError(
                f"{_name(number, item)}: {item.grid[0]} runs of {size} tokens {placeholders[item.kind]} stand for it, "
                f"and run {frame} is not in the prompt where it should be, which {_found(ids, run)}: are items and "
                "placeholders in one order, and as many?"
            )
        spans.append(range(int(run[0]), int(run[-1]) + 1))
    return Placed(item, tuple(spans))


def _name(number: int, item: MediaItem) -> str:
    return f"media: item {number} ({item.kind}, grid {'x'.join(map(str, item.grid))})"


def _found(ids: NDArray[np.int64], run: NDArray[np.int64]) -> str:
    if not len(run):
        return "has no placeholders left"
    first = int(run[0])
    rest = ids[first:] == ids[first]
    length = len(rest) if rest.all() else int(rest.argmin())
    return f"has {length} tokens {ids[first]} from {first} on"


def _number(ids: NDArray[np.int64], items: list[Placed], model: Any) -> Placement:
    grids = {kind: [each.item.grid for each in items if each.item.kind == kind] for kind in ("image", "video")}
    axes, deltas = multimodal_positions(
        ids,
        model.config.position_rule,
        image_grid_thw=grids["image"] or None,
        video_grid_thw=grids["video"] or None,
        cu_seqlens=[0, len(ids)],
    )
    return Placement(tuple(items), axes, int(deltas[0, 0]))
