"""The vision tower of GLM-4.1V, GLM-4.5V and GLM-4.6V: learned positions, resampled smoothly, beside the rotation."""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, ModuleList

from whorl.models.fields import flag, number, section
from whorl.models.vision_tower import (
    CACHED_SIZES,
    Attention,
    GatedMLP,
    PatchEmbedding,
    RMSBlock,
    VisionTower,
    as_stored,
    block_order,
)
from whorl.models.vision_tower_config import Grid, TowerSizes, check_activation
from whorl.nn import Destination, LayerNorm, Linear, Plain, PlainLinear, RMSNorm

_MERGER_EPS = 1e-5  # torch's default for LayerNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig(TowerSizes):
    """`vision_config` of config.json by its own names, with the defaults of Hugging Face's class.

    intermediate_size: of the merger; that of the layers is out_hidden_size.
    """

    depth: int = 24
    hidden_size: int = 1536
    num_heads: int = 12
    out_hidden_size: int = 4096
    intermediate_size: int = 13696
    image_size: int = 336  # side of the square of learned positions, in pixels
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "TowerConfig":
        """Read a vision_config; raises ValueError for unsupported values."""
        check_activation(values, "silu")
        sizes = cls.counts(values)
        if sizes["image_size"] < sizes["patch_size"]:
            raise ValueError(
                f"config.json: vision_config.image_size is {sizes['image_size']}, expected at least the "
                f"{sizes['patch_size']} pixels of a patch"
            )
        return cls(
            **sizes,
            attention_bias=flag(values, "attention_bias"),
            rms_norm_eps=number(values, "rms_norm_eps", 1e-5),
            rope_theta=number(section(values, "rope_parameters"), "rope_theta", 10000.0),
        )

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return self.image_size // self.patch_size


# ---- layers


class Positions(Plain):
    """A square of learned positions."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(weight=(config.side**2, config.hidden_size))

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=0.02, generator=generator)


class Embeddings(Module):
    """The learned positions by their name in checkpoints, resampled to the rows and columns of an image (bicubic)."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.position_embedding = Positions(config)
        self.merge = config.spatial_merge_size

    def forward(self, grid: Grid) -> Tensor:
        """Return the positions of one frame, [P, width] fp32."""
        weight = self.position_embedding.weight
        side = math.isqrt(len(weight))
        square = weight.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        places = centers(grid[1], grid[2], self.merge, weight.device)[None, :, None]
        options = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}
        return nn.functional.grid_sample(square, places, **options)[0, :, :, 0].T  # type: ignore[arg-type]


@functools.lru_cache(maxsize=CACHED_SIZES)
@torch.inference_mode(False)  # a later call may save it for backward
def centers(rows: int, columns: int, merge: int, device: torch.device) -> Tensor:
    """Return the centers of the patches of a frame, [P, 2]: column and row, from -1 to 1 along each side."""
    sides = [((torch.arange(size) + 0.5) / size) * 2 - 1 for size in (rows, columns)]
    row, column = torch.meshgrid(*sides, indexing="ij")
    return block_order(torch.stack((column, row), -1), merge).to(device)


class Block(RMSBlock):
    """A layer of the tower."""

    def __init__(self, config: TowerConfig) -> None:
        attn = Attention(config, bias=config.attention_bias, output_bias=False)
        mlp = GatedMLP(config.hidden_size, config.out_hidden_size, bias=False)
        super().__init__(config.hidden_size, config.rms_norm_eps, attn, mlp)


class Downsample(PlainLinear):
    """Merges the patches of a token: a convolution whose kernel is as large as its stride, as a matrix product."""

    def __init__(self, config: TowerConfig) -> None:
        self.merge, self.width = config.spatial_merge_size, config.hidden_size
        super().__init__(self.width * self.merge**2, config.out_hidden_size, bias=True)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for source, destination in super().destinations(name):
            if source.endswith(".weight") and destination.shape == self.shape:
                # The product takes the channels of one patch after those of another, the file has them in between.
                patches = destination.into.view(-1, self.merge, self.merge, self.width)
                destination = as_stored(destination, patches.permute(0, 3, 1, 2))
            yield source, destination


class Merger(Module):
    """Computes the features of tokens from merged patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        width = config.out_hidden_size
        self.proj = Linear(width, width)
        self.post_projection_norm = LayerNorm(width, _MERGER_EPS)
        gated = GatedMLP(width, config.intermediate_size, bias=False)
        self.gate_up_proj, self.down_proj = gated.gate_up_proj, gated.down_proj
        self.gated = (gated,)  # in a tuple: its layers are above, by their names in checkpoints

    def forward(self, x: Tensor) -> Tensor:
        return self.gated[0](nn.functional.gelu(self.post_projection_norm(self.proj(x))))  # type: ignore[no-any-return]


# ---- the tower


class Tower(VisionTower):
    """The vision tower of GLM-4V."""

    config: TowerConfig

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.patch_embed = PatchEmbedding(config)
        self.post_conv_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.blocks = ModuleList(Block(config) for _ in range(config.depth))
        self.post_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.downsample = Downsample(config)
        self.merger = Merger(config)

    def embed(self, patches: Tensor, grid: Grid) -> Tensor:
        x, _ = self.post_conv_layernorm(super().embed(patches, grid), None)
        return x + self.embeddings(grid).to(x.dtype).repeat(grid[0], 1)  # type: ignore[no-any-return]

    def merge(self, x: Tensor) -> Tensor:
        x = self.post_layernorm(x, None)[0].view(-1, self.downsample.shape[1])
        return self.merger(self.downsample(x))  # type: ignore[no-any-return]
