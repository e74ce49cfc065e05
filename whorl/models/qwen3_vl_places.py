"""Positions of an image's patches: interpolation of learned positions, rotation angles, and their order."""

import functools

import torch
from torch import Tensor

from whorl.rope_config import RopeConfig
from whorl.rope_table import get_rope

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
