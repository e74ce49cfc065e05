"""The vision tower of Qwen3-VL: learned positions beside the rotation, and features after several layers."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import Module, ModuleList

from whorl.models.qwen3_vl_tower_config import TowerConfig
from whorl.models.vision_tower import CACHED_SIZES, EPS, Block, PatchEmbedding, VisionTower, block_order
from whorl.models.vision_tower_config import Grid
from whorl.nn import LayerNorm, Linear, Plain

# ---- layers


class LearnedPositions(Plain):
    """A square of learned positions, interpolated to the rows and columns of an image, from corner to corner."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(weight=(config.side**2, config.hidden_size))
        self.side, self.merge = config.side, config.spatial_merge_size

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=0.02, generator=generator)

    def forward(self, grid: Grid) -> Tensor:
        """Return the positions of one frame, [P, width] fp32: weighted means of the four nearest learned ones."""
        index, weight = nearest(self.side, self.merge, grid[1], grid[2], self.weight.device)
        return (self.weight[index].float() * weight[..., None]).sum(1)


class MLP(Module):
    """Feed-forward network with GELU."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x), approximate="tanh"))


class Merger(Module):
    """Merges a block of neighbouring patches to one token.

    norms_block: the norm is over the channels of the whole block, as for deepstack, instead of each patch.
    """

    def __init__(self, config: TowerConfig, *, norms_block: bool) -> None:
        super().__init__()
        self.width, self.norms_block = config.hidden_size * config.spatial_merge_size**2, norms_block
        self.norm = LayerNorm(self.width if norms_block else config.hidden_size, EPS)
        self.linear_fc1 = Linear(self.width, self.width, bias=True)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.width) if self.norms_block else x).view(-1, self.width)
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x)))


# ---- the tower


class Tower(VisionTower):
    """Qwen3-VL's vision tower."""

    config: TowerConfig

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = LearnedPositions(config)
        self.blocks = ModuleList(Block(config, MLP(config)) for _ in range(config.depth))
        self.merger = Merger(config, norms_block=False)
        self.deepstack_merger_list = ModuleList(
            Merger(config, norms_block=True) for _ in config.deepstack_visual_indexes
        )

    def embed(self, patches: Tensor, grid: Grid) -> Tensor:
        return super().embed(patches, grid) + self.pos_embed(grid).to(patches.dtype).repeat(grid[0], 1)

    def merge(self, x: Tensor) -> Tensor:
        return self.merger(x)  # type: ignore[no-any-return]

    def after(self, layer: int, x: Tensor) -> Tensor | None:
        if layer not in self.config.deepstack_visual_indexes:
            return None
        merger = self.deepstack_merger_list[self.config.deepstack_visual_indexes.index(layer)]
        return merger(x)  # type: ignore[no-any-return]


# ---- interpolated positions


@functools.lru_cache(maxsize=CACHED_SIZES)
@torch.inference_mode(False)  # a later call may save it for backward
def nearest(side: int, merge: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the four learned positions nearest to each patch, [P, 4], and their weights, [P, 4].

    side: of the square of learned positions; merge: patches per token along one side; rows, columns: of patches.
    """
    (row, row_weight), (column, column_weight) = (_taps(size, side) for size in (rows, columns))
    index = row[:, None, :, None] * side + column[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    index, weight = (block_order(x.flatten(2), merge).to(device) for x in (index, weight))
    return index, weight


def _taps(size: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the two nearest of `side` learned positions along one side, [size, 2], and their weights, [size, 2]."""
    position = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    low = position.floor()
    upper = position - low
    taps = torch.stack((low, low + 1), 1).long().clamp(max=side - 1)
    return taps, torch.stack((1 - upper, upper), 1)
