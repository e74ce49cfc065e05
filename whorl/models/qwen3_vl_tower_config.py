"""The sizes of Qwen3-VL's vision tower."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whorl.models.fields import number, section
from whorl.models.vision_tower_config import TowerSizes, check_activation


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig(TowerSizes):
    """`vision_config` of config.json by its own names, with the defaults of Hugging Face's class."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 16
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "TowerConfig":
        """Read a vision_config; raises ValueError for unsupported values."""
        check_activation(values, "gelu_pytorch_tanh")
        sizes = cls.counts(values)
        positions = sizes["num_position_embeddings"]
        if math.isqrt(positions) ** 2 != positions:
            raise ValueError(f"config.json: vision_config.num_position_embeddings is {positions}, expected a square")
        return cls(
            **sizes,
            deepstack_visual_indexes=_deepstack(values, sizes["depth"]),
            rope_theta=number(section(values, "rope_parameters"), "rope_theta", 10000.0),
        )

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return math.isqrt(self.num_position_embeddings)


def _deepstack(values: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    indexes = values.get("deepstack_visual_indexes", (8, 16, 24))
    is_list = isinstance(indexes, list | tuple) and all(isinstance(i, int) and 0 <= i < depth for i in indexes)
    if not is_list or list(indexes) != sorted(set(indexes)):
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes is {indexes!r}, expected increasing numbers "
            f"of its {depth} layers"
        )
    return tuple(indexes)
