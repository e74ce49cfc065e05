"""A vision tower: it turns the patches of an image or video into features of the text model's width.

Families subclass `VisionTower`. An image has the same features whatever runs beside it, and it may pause after any
layer, so that a large image does not delay sequences that decode. Every rank has the full tower.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from whorl import ops
from whorl.models.vision_tower_config import Grid, TowerSizes
from whorl.nn import Destination, Inserted, LayerNorm, Linear, Packed, PlainLinear, RMSNorm
from whorl.rope_config import RopeConfig
from whorl.rope_table import get_rope

EPS = 1e-6  # of the norms of most towers
_ROWS = 48  # initial length of the rotary table, which grows


# ---- layers


class PatchProduct(PlainLinear):
    """The patch embedding: a convolution whose kernel is as large as its stride, computed as a matrix product."""

    def __init__(self, config: TowerSizes, *, bias: bool = True) -> None:
        super().__init__(config.patch_values, config.hidden_size, bias=bias)
        size = config.patch_size
        self.stored_shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, size, size)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for source, destination in super().destinations(name):
            if source.endswith(".weight") and destination.shape == self.shape:
                destination = as_stored(destination, destination.into.view(self.stored_shape))
            yield source, destination


def as_stored(destination: Destination, into: Tensor) -> Destination:
    """Return the destination of a convolution's weight; into: a view of the matrix in the checkpoint's shape."""
    shape = tuple(into.shape)
    return replace(destination, into=into, shape=shape, index=tuple(slice(0, size) for size in shape))


class PatchEmbedding(Module):
    """The patch embedding, by its name in checkpoints."""

    def __init__(self, config: TowerSizes, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = PatchProduct(config, bias=bias)


class Attention(Module):
    """Attention between the patches of a frame, or of a window of it. bias, output_bias: of q, k and v; of `proj`."""

    def __init__(self, config: TowerSizes, *, bias: bool = True, output_bias: bool = True) -> None:
        super().__init__()
        self.heads, self.scale = config.num_heads, config.head_dim**-0.5
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=bias)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=output_bias)

    def forward(self, x: Tensor, rotary: Tensor, starts: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = ops.rope(q, k, rotary)
        return self.proj(ops.packed_attention(q, k, v, starts, scale=self.scale).flatten(1))


class GatedMLP(Module):
    """SwiGLU feed-forward network of width -> inner -> width channels."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.glu(self.gate_up_proj(x)))


class Block(Module):
    """A layer with LayerNorm."""

    def __init__(self, config: TowerSizes, mlp: Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = (LayerNorm(config.hidden_size, EPS) for _ in range(2))
        self.attn, self.mlp = Attention(config), mlp

    def forward(self, x: Tensor, rotary: Tensor, starts: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), rotary, starts)
        return x + self.mlp(self.norm2(x))


class RMSBlock(Module):
    """A layer with RMSNorm."""

    def __init__(self, width: int, eps: float, attn: Attention, mlp: Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = (RMSNorm(width, eps) for _ in range(2))
        self.attn, self.mlp = attn, mlp

    def forward(self, x: Tensor, rotary: Tensor, starts: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x, None)[0], rotary, starts)
        return x + self.mlp(self.norm2(x, None)[0])


# ---- the tower


@dataclass(kw_only=True, slots=True, eq=False)
class Encoding:
    """An image or video that is being encoded: `layer` layers have run."""

    x: Tensor  # [P, C]
    rotary: Tensor  # [P, R]
    starts: Tensor  # [frames + 1] int32: a patch attends to those of its frame
    windows: Tensor | None = None  # [W + 1] int32: or to those of its window, in some layers of some towers
    order: Tensor | None = None  # [N tokens]: in such a tower, the index in x of each token of the image
    merged: list[Tensor] = field(default_factory=list)  # deepstack features so far, [N tokens, text width] each
    layer: int = 0

    @property
    def num_patches(self) -> int:
        return len(self.x)


def join(encodings: Sequence[Encoding], merge: int) -> Encoding:
    """Concatenate encodings that have run the same layers; frames and windows still attend to their own patches only.

    merge: patches that become one token.
    """
    first = encodings[0]
    firsts = list(itertools.accumulate((each.num_patches for each in encodings), initial=0))
    orders = [each.order + i // merge for each, i in zip(encodings, firsts, strict=False) if each.order is not None]
    return Encoding(
        x=torch.cat([each.x for each in encodings]),
        rotary=torch.cat([each.rotary for each in encodings]),
        starts=_joined([each.starts for each in encodings], firsts),
        windows=_joined([each.windows for each in encodings if each.windows is not None], firsts) if orders else None,
        order=torch.cat(orders) if orders else None,
        merged=[torch.cat(parts) for parts in zip(*(each.merged for each in encodings), strict=True)],
        layer=first.layer,
    )


def _joined(starts: Sequence[Tensor], firsts: Sequence[int]) -> Tensor:
    """Return the starts of segments that lie one behind the other. firsts: where those of each begin, and the end."""
    shifted = [each[:-1] + first for each, first in zip(starts, firsts, strict=False)]
    return torch.cat([*shifted, starts[0].new_tensor(firsts[-1:])])


class VisionTower(Module):
    """A vision tower; `begin` and `advance` encode an image layer by layer, `encode` in one call.

    A subclass builds `patch_embed`, `blocks` and what its `embed` and `merge` use.
    """

    config: TowerSizes
    patch_embed: PatchEmbedding
    blocks: ModuleList

    def embed(self, patches: Tensor, grid: Grid) -> Tensor:
        """Return the embedded patches [P, C], before the first layer."""
        return self.patch_embed.proj(patches)

    def merge(self, x: Tensor) -> Tensor:
        """Return the features [N, text width] of the patches [P, C], after the last layer."""
        raise NotImplementedError

    def after(self, layer: int, x: Tensor) -> Tensor | None:
        """Return the features that are added after a layer of the text model (deepstack), if this layer gives some."""
        return None

    def arrange(self, encoding: Encoding, grid: Grid) -> Encoding:
        """Return an encoding that begins, in the order that the layers take; by default the image's own."""
        return encoding

    def segments(self, encoding: Encoding, layer: int) -> Tensor:
        """Return the starts of the segments inside which a layer's patches attend to each other."""
        return encoding.starts

    @torch.inference_mode()
    def begin(self, patches: Tensor, grid: Grid) -> Encoding:
        """Embed the patches and return the encoding, before its first layer.

        patches: [P, V] fp32, in the order of `whorl.media.MediaItem`, on the tower's device; raises ValueError for
        another shape than that of the grid.
        """
        return self._begin(patches, grid)

    def _begin(self, patches: Tensor, grid: Grid) -> Encoding:
        frames, rows, columns = grid
        config, expected = self.config, (math.prod(grid), self.config.patch_values)
        if tuple(patches.shape) != expected:
            raise ValueError(
                f"tower: patches are {list(patches.shape)}, expected {list(expected)} for a grid of {grid}"
            )
        x = self.embed(patches.to(self.patch_embed.proj.dtype), grid)
        starts = torch.arange(frames + 1, dtype=torch.int32, device=patches.device) * rows * columns
        angles = rotary(
            config.head_dim, config.rope_theta, config.spatial_merge_size, rows, columns, patches.device
        ).repeat(frames, 1)
        return self.arrange(Encoding(x=x, rotary=angles, starts=starts), grid)

    @torch.inference_mode()
    def advance(self, encoding: Encoding, layers: int) -> Tensor | None:
        """Run `layers` more layers; returns features [1 + deepstack, N, text width] after the last one, else None."""
        return self._advance(encoding, layers)

    def _advance(self, encoding: Encoding, layers: int) -> Tensor | None:
        for i in range(encoding.layer, min(encoding.layer + layers, self.config.depth)):
            encoding.x = self.blocks[i](encoding.x, encoding.rotary, self.segments(encoding, i))
            encoding.layer = i + 1
            if (features := self.after(i, encoding.x)) is not None:
                encoding.merged.append(features)
        if encoding.layer < self.config.depth:
            return None
        merged = self.merge(encoding.x)
        return torch.stack([merged if encoding.order is None else merged[encoding.order], *encoding.merged])

    @torch.inference_mode()
    def advance_all(self, encodings: Sequence[Encoding], layers: int) -> list[Tensor | None]:
        """Do what `advance` does for several encodings in one launch; they must have run the same layers.

        An encoding gives the same bits as alone only where the rows of a product do not depend on each other.
        """
        if len(encodings) == 1:
            return [self.advance(encodings[0], layers)]
        merge = self.config.spatial_merge_size**2
        joined, patches = join(encodings, merge), [encoding.num_patches for encoding in encodings]
        features = self.advance(joined, layers)
        tokens = [count // merge for count in patches]
        if features is not None:
            return list(features.split(tokens, 1))
        merged = [encoding.split(tokens) for encoding in joined.merged]
        for i, (encoding, x) in enumerate(zip(encodings, joined.x.split(patches), strict=True)):
            encoding.x, encoding.layer, encoding.merged = x, joined.layer, [parts[i] for parts in merged]
        return [None] * len(encodings)

    def insert(self, packed: Packed, width: int) -> Inserted:
        """Encode the pictures of packed sequences with a gradient, for a text model of this width.

        Their bits are those of `encode`, one picture at a time.
        """
        device, encoded = packed.token_ids.device, []
        for picture in packed.pictures:
            features = self._advance(self._begin(picture.patches.to(device), picture.grid), self.config.depth)
            assert features is not None
            if features.shape[1] != len(picture.tokens):
                raise ValueError(
                    f"tower: a picture of grid {picture.grid} has {features.shape[1]} tokens, expected "
                    f"{len(picture.tokens)}, the places for them"
                )
            encoded.append(features)
        tokens = torch.cat([picture.tokens for picture in packed.pictures])
        mask = torch.zeros(len(packed.token_ids), 1, dtype=torch.bool, device=device)
        mask[tokens] = True
        joined = torch.cat(encoded, 1)
        placed = joined.new_zeros(len(joined), len(mask), width).index_copy(1, tokens, joined)
        return Inserted(mask=mask, features=tuple(placed))

    def encode(self, patches: Tensor, grid: Grid) -> Tensor:
        """Encode one image or video in one call; returns features [1 + deepstack, N, text width]."""
        return self.encode_all([(patches, grid)])[0]

    def encode_all(self, pictures: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
        """Encode several images, given as patches and grid, in one call; see `advance_all`."""
        encoded = self.advance_all([self.begin(*picture) for picture in pictures], self.config.depth)
        return [features for features in encoded if features is not None]


# ---- rotation angles of patches, and their order

# Image sizes whose tables stay on the device. A copy to the device waits for everything that runs there, so a copy for
# every image would keep the host from launching ahead.
CACHED_SIZES = 8


@functools.lru_cache(maxsize=CACHED_SIZES)
@torch.inference_mode(False)  # a later call may save it for backward
def rotary(head_dim: int, theta: float, merge: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return cos and sin of the patches of one frame, [P, R]: half of the angles follow the row, half the column.

    theta: the rotary base; merge: patches per token along one side; rows, columns: of patches.
    """
    rope = RopeConfig.from_keywords(head_dim=head_dim // 2, max_position=_ROWS, base=theta)
    table = get_rope(rope, grow=True).cos_sin(seq_len=max(rows, columns))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    positions = [block_order(x[..., None], merge)[:, 0] for x in (row, column)]
    (cos, sin), (cos_column, sin_column) = (table[index].chunk(2, -1) for index in positions)
    return torch.cat((cos, cos_column, sin, sin_column), -1).to(device)


def block_order(x: Tensor, merge: int) -> Tensor:
    """Reorder patches [rows, columns, n] to [P, n], so that the merge * merge patches of a token are neighbours."""
    blocks = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # row of blocks, row, column of blocks, column
    return blocks.transpose(1, 2).flatten(0, 3)
