"""The vision tower of Qwen3-VL: it turns the patches of an image or video into features of the text model's width.

An image has the same features whatever runs beside it, and it may pause after any layer, so that a large image does not
delay sequences that decode. Every rank has the full tower.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import Module, ModuleList

from whorl import ops
from whorl.models.qwen3_vl_tower_config import Grid, TowerConfig
from whorl.nn import Destination, LayerNorm, Linear, Plain, PlainLinear
from whorl.rope_config import RopeConfig
from whorl.rope_table import get_rope

_EPS = 1e-6


# ---- layers


class PatchProduct(PlainLinear):
    """The patch embedding: a convolution whose kernel is as large as its stride, computed as a matrix product."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config.patch_values, config.hidden_size, bias=True)
        size = config.patch_size
        self.stored_shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, size, size)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for source, destination in super().destinations(name):
            if source.endswith(".weight") and destination.shape == self.shape:
                index = tuple(slice(0, size) for size in self.stored_shape)
                destination = Destination(
                    into=destination.into.view(self.stored_shape),
                    shape=self.stored_shape,
                    index=index,
                    dtype=destination.dtype,
                )
            yield source, destination


class PatchEmbedding(Module):
    """The patch embedding, by its name in checkpoints."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.proj = PatchProduct(config)


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


class Attention(Module):
    """Attention between the patches of a frame."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.heads, self.scale = config.num_heads, config.head_dim**-0.5
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, rotary: Tensor, starts: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = ops.rope(q, k, rotary)
        return self.proj(ops.packed_attention(q, k, v, starts, scale=self.scale).flatten(1))


class MLP(Module):
    """Feed-forward network with GELU."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x), approximate="tanh"))


class Block(Module):
    """A layer of the tower."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (LayerNorm(config.hidden_size, _EPS) for _ in range(2))
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, rotary: Tensor, starts: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), rotary, starts)
        return x + self.mlp(self.norm2(x))


class Merger(Module):
    """Merges a block of neighbouring patches to one token.

    norms_block: the norm is over the channels of the whole block, as for deepstack, instead of each patch.
    """

    def __init__(self, config: TowerConfig, *, norms_block: bool) -> None:
        super().__init__()
        self.width, self.norms_block = config.hidden_size * config.spatial_merge_size**2, norms_block
        self.norm = LayerNorm(self.width if norms_block else config.hidden_size, _EPS)
        self.linear_fc1 = Linear(self.width, self.width, bias=True)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.width) if self.norms_block else x).view(-1, self.width)
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x)))


# ---- the tower


@dataclass(slots=True, eq=False)
class Encoding:
    """An image or video that is being encoded: `layer` layers have run."""

    x: Tensor  # [P, C]
    rotary: Tensor  # [P, R]
    starts: Tensor  # [frames + 1] int32: a patch attends to those of its frame
    merged: list[Tensor] = field(default_factory=list)  # deepstack features so far, [N tokens, text width] each
    layer: int = 0

    @property
    def num_patches(self) -> int:
        return len(self.x)


def join(encodings: Sequence[Encoding]) -> Encoding:
    """Concatenate encodings that have run the same layers; frames still attend to their own patches only."""
    ends = itertools.accumulate((encoding.num_patches for encoding in encodings), initial=0)
    starts = [encoding.starts[:-1] + end for encoding, end in zip(encodings, ends, strict=False)]
    total = encodings[0].starts.new_tensor([sum(encoding.num_patches for encoding in encodings)])
    return Encoding(
        torch.cat([encoding.x for encoding in encodings]),
        torch.cat([encoding.rotary for encoding in encodings]),
        torch.cat([*starts, total]),
        [torch.cat(parts) for parts in zip(*(encoding.merged for encoding in encodings), strict=True)],
        encodings[0].layer,
    )


class Tower(Module):
    """The vision tower; `begin` and `advance` encode an image layer by layer, `encode` in one call."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = LearnedPositions(config)
        self.blocks = ModuleList(Block(config) for _ in range(config.depth))
        self.merger = Merger(config, norms_block=False)
        self.deepstack_merger_list = ModuleList(
            Merger(config, norms_block=True) for _ in config.deepstack_visual_indexes
        )

    @torch.inference_mode()
    def begin(self, patches: Tensor, grid: Grid) -> Encoding:
        """Embed the patches and return the encoding, before its first layer.

        patches: [P, V] fp32, in the order of `whorl.media.MediaItem`, on the tower's device; raises ValueError for
        another shape than that of the grid.
        """
        frames, rows, columns = grid
        dtype = self.pos_embed.weight.dtype
        if tuple(patches.shape) != (math.prod(grid), self.config.patch_values):
            raise ValueError(
                f"tower: patches are {list(patches.shape)}, expected [{math.prod(grid)}, {self.config.patch_values}] "
                f"for a grid of {grid}"
            )
        x = self.patch_embed.proj(patches.to(dtype)) + self.pos_embed(grid).to(dtype).repeat(frames, 1)
        starts = torch.arange(frames + 1, dtype=torch.int32, device=patches.device) * rows * columns
        config, sizes = self.config, (rows, columns, patches.device)
        angles = rotary(config.head_dim, config.side, config.rope_theta, config.spatial_merge_size, *sizes)
        return Encoding(x, angles.repeat(frames, 1), starts)

    @torch.inference_mode()
    def advance(self, encoding: Encoding, layers: int) -> Tensor | None:
        """Run `layers` more layers; returns features [1 + deepstack, N, text width] after the last one, else None."""
        for i in range(encoding.layer, min(encoding.layer + layers, self.config.depth)):
            encoding.x = self.blocks[i](encoding.x, encoding.rotary, encoding.starts)
            encoding.layer = i + 1
            if i in self.config.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[self.config.deepstack_visual_indexes.index(i)]
                encoding.merged.append(merger(encoding.x))
        if encoding.layer < self.config.depth:
            return None
        return torch.stack([self.merger(encoding.x), *encoding.merged])

    @torch.inference_mode()
    def advance_all(self, encodings: Sequence[Encoding], layers: int) -> list[Tensor | None]:
        """Do what `advance` does for several encodings in one launch; they must have run the same layers.

        An encoding gives the same bits as alone only where the rows of a product do not depend on each other.
        """
        if len(encodings) == 1:
            return [self.advance(encodings[0], layers)]
        joined, patches = join(encodings), [encoding.num_patches for encoding in encodings]
        features = self.advance(joined, layers)
        tokens = [count // self.config.spatial_merge_size**2 for count in patches]
        if features is not None:
            return list(features.split(tokens, 1))
        merged = [encoding.split(tokens) for encoding in joined.merged]
        for i, (encoding, x) in enumerate(zip(encodings, joined.x.split(patches), strict=True)):
            encoding.x, encoding.layer, encoding.merged = x, joined.layer, [parts[i] for parts in merged]
        return [None] * len(encodings)

    def encode(self, patches: Tensor, grid: Grid) -> Tensor:
        """Encode one image or video in one call; returns features [1 + deepstack, N, text width]."""
        return self.encode_all([(patches, grid)])[0]

    def encode_all(self, pictures: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
        """Encode several images, given as patches and grid, in one call; see `advance_all`."""
        encoded = self.advance_all([self.begin(*picture) for picture in pictures], self.config.depth)
        return [features for features in encoded if features is not None]


# ---- positions of patches: interpolated learned ones, rotation angles, and their order

# Image sizes whose tables stay on the device. A copy to the device waits for everything that runs there, so a copy for
# every image would keep the host from launching ahead.
CACHED_SIZES = 8


@functools.lru_cache(maxsize=CACHED_SIZES)
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


@functools.lru_cache(maxsize=CACHED_SIZES)
def rotary(head_dim: int, side: int, theta: float, merge: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return cos and sin of the patches of one frame, [P, R]: half of the angles follow the row, half the column.

    side: the initial length of the table, which grows; theta: the rotary base; the other arguments as for `nearest`.
    """
    rope = RopeConfig.from_keywords(head_dim=head_dim // 2, max_position=side, base=theta)
    table = get_rope(rope, grow=True).cos_sin(seq_len=max(rows, columns))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    positions = [block_order(x[..., None], merge)[:, 0] for x in (row, column)]
    (cos, sin), (cos_column, sin_column) = (table[index].chunk(2, -1) for index in positions)
    return torch.cat((cos, cos_column, sin, sin_column), -1).to(device)


def block_order(x: Tensor, merge: int) -> Tensor:
    """Reorder patches [rows, columns, n] to [P, n], so that the merge * merge patches of a token are neighbours."""
    blocks = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # row of blocks, row, column of blocks, column
    return blocks.transpose(1, 2).flatten(0, 3)
