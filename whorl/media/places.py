"""Where pictures and videos stand in a prompt: the chat template writes one token for each, which becomes as many as
the model has features for it.

As in transformers' Qwen3VLProcessor only that token is replaced. What the template puts around it stays: around a
video's times, too, with every pair of frames between marks of its own.
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
class Place:
    """num_tokens: of a picture, or of each temporal patch of a video. seconds: of those."""

    kind: Literal["image", "video"]
    num_tokens: int
    seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, item: MediaItem, merge_size: int) -> "Place":
        _, rows, columns = item.grid
        return cls(item.kind, rows * columns // merge_size**2, item.seconds)

    @classmethod
    def from_json(cls, given: Sequence[Any]) -> "Place":
        return cls(given[0], given[1], tuple(given[2]))

    def to_json(self) -> list[Any]:
        return [self.kind, self.num_tokens, self.seconds]

    @property
    def text(self) -> str:
        pads = PADS[self.kind] * self.num_tokens
        if self.kind == "image":
            return pads
        return "".join(f"<{time:.1f} seconds>{VISION_START}{pads}{VISION_END}" for time in self.seconds)


def expand(text: str, places: Sequence[Place]) -> str:
    """The prompt with every place at its size. places: all pictures and videos, in the order of the prompt.

    MediaError: there are more or fewer marks in the text. A message that writes one out, or a template that does not
    know of pictures, must not shift the others.
    """
    found = [next(kind for kind, pad in PADS.items() if pad == mark) for mark in _PAD.findall(text)]
    for kind, name in _NAMES.items():
        given, marked = sum(place.kind == kind for place in places), found.count(kind)
        if given != marked:
            what = f"the prompt has {marked} places for {name} ({PADS[kind]}), and there are {given} of them"
            raise MediaError(f"{what}; the text of a message must not write that token, and the template must")
    left = {kind: iter([place for place in places if place.kind == kind]) for kind in PADS}
    kinds = iter(found)
    return _PAD.sub(lambda _: next(left[next(kinds)]).text, text)
