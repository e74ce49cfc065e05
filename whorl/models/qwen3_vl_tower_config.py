"""The sizes of Qwen3-VL's vision tower."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from whorl.models.fields import count, number, section

Grid = tuple[int, int, int]  # temporal patches, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig:
    """`vision_config` of config.json by its own names, with the defaults of Hugging Face's class."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...]
    rope_theta: float = 10000.0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "TowerConfig":
        """Read a vision_config; raises ValueError for unsupported values."""
        if (activation := values.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
            raise ValueError(f"config.json: vision_config.hidden_act is {activation!r}, expected gelu_pytorch_tanh")
        defaults: dict[str, Any] = {field.name: field.default for field in fields(cls) if field.type is int}
        sizes = {name: count(values, name, default) for name, default in defaults.items()}
        _check_sizes(sizes)
        return cls(
            **sizes,
            deepstack_visual_indexes=_deepstack(values, sizes["depth"]),
            rope_theta=number(section(values, "rope_parameters"), "rope_theta", 10000.0),
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """The numbers of a patch: channels, frames, rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    def num_tokens(self, grid: Grid) -> int:
        """Return the placeholder tokens that a grid of patches takes."""
        return math.prod(grid) // self.spatial_merge_size**2


def _check_sizes(sizes: Mapping[str, int]) -> None:
    width, heads, positions = sizes["hidden_size"], sizes["num_heads"], sizes["num_position_embeddings"]
    if width % heads or width // heads % 4:
        raise ValueError(
            f"config.json: vision_config has {heads} heads of {width} channels, expected a multiple of four channels "
            "per head: rows and columns each rotate half of a head's channels, in pairs"
        )
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"config.json: vision_config.num_position_embeddings is {positions}, expected a square")


def _deepstack(values: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    indexes = values.get("deepstack_visual_indexes", (8, 16, 24))
    is_list = isinstance(indexes, list | tuple) and all(isinstance(i, int) and 0 <= i < depth for i in indexes)
    if not is_list or list(indexes) != sorted(set(indexes)):
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes is {indexes!r}, expected increasing numbers "
            f"of its {depth} layers"
        )
    return tuple(indexes)
