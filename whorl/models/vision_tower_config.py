"""What the vision towers of all families have in common: the sizes of patches, heads and tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from whorl.models.fields import count

Grid = tuple[int, int, int]  # temporal patches, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSizes:
    """`vision_config` of config.json by its own names; a family's subclass has the defaults of Hugging Face's class.

    deepstack_visual_indexes: layers whose features are added after the first layers of the text model.
    """

    depth: int
    hidden_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    rope_theta: float = 10000.0
    deepstack_visual_indexes: tuple[int, ...] = ()

    @classmethod
    def counts(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that are whole numbers; raises ValueError for those that make no tower."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(cls) if field.type is int}
        sizes = {name: count(values, name, default) for name, default in defaults.items()}
        width, heads = sizes["hidden_size"], sizes["num_heads"]
        if width % heads or width // heads % 4:
            raise ValueError(
                f"config.json: vision_config has {heads} heads of {width} channels, expected a multiple of four "
                "channels per head: rows and columns each rotate half of a head's channels, in pairs"
            )
        return sizes

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """The numbers of a patch: channels, frames, rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, grid: Grid) -> int:
        """Return the placeholder tokens that a grid of patches takes."""
        return math.prod(grid) // self.spatial_merge_size**2


def check_activation(values: Mapping[str, Any], expected: str) -> None:
    """Raise ValueError if a vision_config names another activation."""
    if (activation := values.get("hidden_act") or expected) != expected:
        raise ValueError(f"config.json: vision_config.hidden_act is {activation!r}, expected {expected}")


def check_width(tower: TowerSizes, text: Mapping[str, Any]) -> None:
    """Raise ValueError if a tower's features do not have the width of the text model's embeddings."""
    if tower.out_hidden_size != text["hidden_size"]:
        raise ValueError(
            f"config.json: vision_config.out_hidden_size is {tower.out_hidden_size}, expected the text's "
            f"hidden_size, {text['hidden_size']}: features replace embeddings"
        )
