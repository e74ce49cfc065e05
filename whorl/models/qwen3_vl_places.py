"""Where the patches of a picture stand: learned positions near them, angles, and the order they come in."""

import functools

import torch
from torch import Tensor

from whorl.rope_config import RopeConfig
from whorl.rope_table import get_rope

# Sizes of pictures whose tables stay on the device. A copy to it waits for all that runs there: with one for every
# picture, nothing would be launched ahead.
KEPT = 8


@functools.lru_cache(maxsize=KEPT)
def nearest(side: int, merge: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[P, 4] places in the table, and their weights."""
    (row, row_share), (column, column_share) = (_taps(size, side) for size in (rows, columns))
    at = row[:, None, :, None] * side + column[None, :, None, :]
    share = row_share[:, None, :, None] * column_share[None, :, None, :]
    at, share = (block_order(x.flatten(2), merge).to(device) for x in (at, share))
    return at, share


def _taps(size: int, side: int) -> tuple[Tensor, Tensor]:
    """[size, 2] places in the table along one side, and their weights."""
    place = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    low = place.floor()
    upper = place - low
    taps = torch.stack((low, low + 1), 1).long().clamp(max=side - 1)
    return taps, torch.stack((1 - upper, upper), 1)


@functools.lru_cache(maxsize=KEPT)
def rotary(head_dim: int, side: int, theta: float, merge: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """[P, R] of cos and sin of one frame: half of the angles turn with the row, half with the column."""
    rope = RopeConfig.from_keywords(head_dim=head_dim // 2, max_position=side, base=theta)
    table = get_rope(rope, grow=True).cos_sin(seq_len=max(rows, columns))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = [block_order(x[..., None], merge)[:, 0] for x in (row, column)]
    (cos, sin), (cos_column, sin_column) = (table[each].chunk(2, -1) for each in at)
    return torch.cat((cos, cos_column, sin, sin_column), -1).to(device)


def block_order(x: Tensor, merge: int) -> Tensor:
    """[rows, columns, n] to [P, n]: merge blocks one after the other, each row by row."""
    blocks = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # row of blocks, row, column of blocks, column
    return blocks.transpose(1, 2).flatten(0, 3)
