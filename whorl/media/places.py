"""Reserves the tokens of pictures and videos in a prompt.

The chat template writes one placeholder token for each picture or video; it is replaced by as many as the model has
features for it. As in transformers' Qwen3VLProcessor, only the placeholder is replaced, and the tokens that the
template puts around it stay. So the times of a video stand between these, with each temporal patch in its own start and
end tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import MediaError
from .item import MediaItem

PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
_PAD = re.compile("|".join(re.escape(pad) for pad in PADS.values()))
_NAMES = {"image": "pictures", "video": "videos"}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The tokens of one picture or video. num_tokens: of a picture, or of each temporal patch of a video. seconds: the
    time of each temporal patch."""

    kind: Literal["image", "video"]
    num_tokens: int
    seconds: tuple[float, ...] = ()

    @classmethod
    def for_item(cls, item: MediaItem, merge_size: int) -> "Placeholder":
        """Return the place of an item. merge_size: of the vision tower."""
        _, rows, columns = item.grid
        return cls(item.kind, rows * columns // merge_size**2, item.seconds)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "Placeholder":
        """Return the place that `to_json` has written."""
        return cls(fields[0], fields[1], tuple(fields[2]))

    def to_json(self) -> list[Any]:
        return [self.kind, self.num_tokens, self.seconds]

    @property
    def text(self) -> str:
        """The text that replaces the placeholder."""
        pads = PADS[self.kind] * self.num_tokens
        if self.kind == "image":
            return pads
        return "".join(f"<{time:.1f} seconds>{VISION_START}{pads}{VISION_END}" for time in self.seconds)


def expand(text: str, places: Sequence[Placeholder]) -> str:
    """Replace every placeholder in a prompt. places: all pictures and videos, in the order of the prompt.

    Raises MediaError when the text has more or fewer placeholders than there are places: a message that contains a
    placeholder, or a template without pictures, must not shift the others.
    """
    kinds = [next(kind for kind, pad in PADS.items() if pad == mark) for mark in _PAD.findall(text)]
    for kind, name in _NAMES.items():
        expected, actual = sum(place.kind == kind for place in places), kinds.count(kind)
        if expected != actual:
            problem = f"the prompt has {actual} places for {name} ({PADS[kind]}), and there are {expected} of them"
            raise MediaError(f"{problem}; the text of a message must not write that token, and the template must")
    remaining = {kind: iter([place for place in places if place.kind == kind]) for kind in PADS}
    next_kind = iter(kinds)
    return _PAD.sub(lambda _: next(remaining[next(next_kind)]).text, text)
