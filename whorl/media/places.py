"""Reserves the tokens of pictures and videos in a prompt.

The chat template writes one placeholder token for each picture or video; it is replaced by as many as the model has
features for it. As in transformers' processors, only the placeholder is replaced, and the tokens that the template puts
around it stay. So the times of Qwen3-VL's and GLM-4V's videos stand between these, with each temporal patch in its own
start and end tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import MediaError
from .families import DEFAULT, FAMILIES
from .item import MediaItem

_NAMES = {"image": "pictures", "video": "videos"}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The tokens of one picture or video. num_tokens: of a picture, or of each temporal patch of a video. seconds: the
    time of each temporal patch. family: of the model, a key of `FAMILIES`."""

    kind: Literal["image", "video"]
    num_tokens: int
    seconds: tuple[float, ...] = ()
    family: str = DEFAULT

    @classmethod
    def for_item(cls, item: MediaItem, merge_size: int) -> "Placeholder":
        """Return the place of an item. merge_size: of the vision tower."""
        _, rows, columns = item.grid
        return cls(item.kind, rows * columns // merge_size**2, item.seconds, item.family)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "Placeholder":
        """Return the place that `to_json` has written."""
        return cls(fields[0], fields[1], tuple(fields[2]), fields[3])

    def to_json(self) -> list[Any]:
        return [self.kind, self.num_tokens, self.seconds, self.family]

    @property
    def text(self) -> str:
        """The text that replaces the placeholder."""
        family = FAMILIES[self.family]
        if self.kind == "image":
            return family.image * self.num_tokens
        return "".join(family.frame_text(self.num_tokens, seconds) for seconds in self.seconds)


def expand(text: str, places: Sequence[Placeholder], family: str = DEFAULT) -> str:
    """Replace every placeholder in a prompt. places: all pictures and videos, in the order of the prompt. family: of
    the model, which decides what a placeholder is; a key of `FAMILIES`.

    Raises MediaError when the text has more or fewer placeholders than there are places: a message that contains a
    placeholder, or a template without pictures, must not shift the others.
    """
    pads = FAMILIES[family].pads
    pattern = re.compile("|".join(re.escape(pad) for pad in pads.values()))
    kinds = [next(kind for kind, pad in pads.items() if pad == mark) for mark in pattern.findall(text)]
    for kind, name in _NAMES.items():
        expected, actual = sum(place.kind == kind for place in places), kinds.count(kind)
        if expected != actual:
            problem = f"the prompt has {actual} places for {name} ({pads[kind]}), and there are {expected} of them"
            raise MediaError(f"{problem}; the text of a message must not write that token, and the template must")
    remaining = {kind: iter([place for place in places if place.kind == kind]) for kind in pads}
    next_kind = iter(kinds)
    return pattern.sub(lambda _: next(remaining[next(next_kind)]).text, text)
