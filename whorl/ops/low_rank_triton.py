# mypy: allow-untyped-defs
"""Low-rank updates in Triton: tiles of rows, and for each group of a tile one pass over that group's matrices.

Rows need no order. A program looks up which groups its tile has, in the order of their first rows, and takes every
`programs`-th of them with the other rows masked. A prompt's tile has one group or two, so few programs per tile are
enough; a decoding tile may have as many as it has rows, and each of them gets a program of its own. The bits are the
same, since tensor cores add in the order of k whatever the tile.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._launch_triton import launched
from ._rows import ceil_div, power_of_2, unit_stride
from .linear_triton import dot

FEW = 256  # rows up to which tiles have 16 of them: more of them would leave multiprocessors idle


@triton.jit
def _groups(groups_ptr, rows, T):
    """Return the groups of the rows, their order among the tile's groups (-1: the row is not its group's first), and
    how many groups there are. Group -1 is none."""
    groups = tl.load(groups_ptr + rows, mask=rows < T, other=-1)
    place = tl.arange(0, rows.shape[0])
    is_same_before = (groups[:, None] == groups[None, :]) & (place[None, :] < place[:, None])
    is_first = (tl.sum(is_same_before.to(tl.int32), 1) == 0) & (groups >= 0)
    order = tl.where(is_first, tl.cumsum(is_first.to(tl.int32), 0) - 1, -1)
    return groups, order, tl.sum(is_first.to(tl.int32), 0)


@launched
@triton.jit(do_not_specialize_on_alignment=["T"])
def _down_kernel(
    x_ptr,
    a_ptr,
    groups_ptr,
    ranks_ptr,
    hidden_ptr,
    x_stride,
    T,
    K,
    R,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute hidden = x A^T for one part and RANKS of its ranks; hidden is [T, PARTS, WIDTH], zero past a rank."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    blocks = tl.cdiv(WIDTH, RANKS)
    part = tl.program_id(2) // blocks
    ranks = tl.program_id(2) % blocks * RANKS + tl.arange(0, RANKS)
    groups, order, count = _groups(groups_ptr, rows, T)
    for index in range(tl.program_id(1), count, tl.num_programs(1)):
        group = tl.sum(tl.where(order == index, groups, 0), 0)
        rank = tl.load(ranks_ptr + group * PARTS + part)
        if tl.program_id(2) % blocks * RANKS < rank:
            is_row = groups == group
            a_at = a_ptr + (group * PARTS + part).to(tl.int64) * R * K + ranks[None, :].to(tl.int64) * K
            x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride
            total = tl.zeros((ROWS, RANKS), tl.float32)
            for start in range(0, K, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                x = tl.load(x_at + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
                a = tl.load(a_at + k[:, None], mask=(ranks < rank)[None, :] & (k < K)[:, None], other=0.0)
                total = dot(x, a, total, WIDEN)
            to = hidden_ptr + (rows.to(tl.int64)[:, None] * PARTS + part) * WIDTH + ranks[None, :]
            tl.store(to, total.to(hidden_ptr.dtype.element_ty), mask=is_row[:, None] & (ranks < WIDTH)[None, :])


@launched
@triton.jit(do_not_specialize_on_alignment=["T"])
def _up_kernel(
    y_ptr,
    hidden_ptr,
    b_ptr,
    bias_ptr,
    groups_ptr,
    ranks_ptr,
    scales_ptr,
    out_ptr,
    y_stride,
    T,
    N,
    R,
    ENDS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute out = y + (hidden B^T + bias) * scale for COLUMNS columns of one part, and copy rows without a group."""
    block, part, first, end = tl.program_id(2), 0, 0, 0
    before = 0  # blocks of columns of the parts before
    for index in tl.static_range(PARTS):
        low = 0 if index == 0 else ENDS[index - 1]
        is_here = block >= before
        part = tl.where(is_here, index, part)
        first = tl.where(is_here, low + (block - before) * COLUMNS, first)
        end = tl.where(is_here, ENDS[index], end)
        before += (ENDS[index] - low + COLUMNS - 1) // COLUMNS
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    is_column = columns < end
    kind = out_ptr.dtype.element_ty
    y_at = y_ptr + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    groups, order, count = _groups(groups_ptr, rows, T)
    if tl.program_id(1) == 0:
        is_none = ((groups < 0) & (rows < T))[:, None] & is_column[None, :]
        tl.store(out_at, tl.load(y_at, mask=is_none, other=0.0), mask=is_none)
    for index in range(tl.program_id(1), count, tl.num_programs(1)):
        group = tl.sum(tl.where(order == index, groups, 0), 0)
        rank = tl.load(ranks_ptr + group * PARTS + part)
        is_mine = (groups == group)[:, None] & is_column[None, :]
        y = tl.load(y_at, mask=is_mine, other=0.0)
        if rank > 0:
            b_at = b_ptr + group.to(tl.int64) * N * R + columns[None, :].to(tl.int64) * R
            hidden_at = hidden_ptr + (rows.to(tl.int64)[:, None] * PARTS + part) * WIDTH
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, rank, RANKS):
                r = start + tl.arange(0, RANKS)
                hidden = tl.load(
                    hidden_at + r[None, :], mask=(groups == group)[:, None] & (r < rank)[None, :], other=0.0
                )
                b = tl.load(b_at + r[:, None], mask=(r < rank)[:, None] & is_column[None, :], other=0.0)
                total = dot(hidden, b, total, WIDEN)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + group.to(tl.int64) * N + columns, mask=is_column, other=0.0)
                total += bias.to(tl.float32)[None, :]
            scaled = (total.to(kind).to(tl.float32) * tl.load(scales_ptr + group * PARTS + part)).to(kind)
            y = (y.to(tl.float32) + scaled.to(tl.float32)).to(kind)
        tl.store(out_at, y, mask=is_mine)


def forward(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    groups: Tensor,
    ranks: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    bias: Tensor | None,
) -> Tensor:
    """Compute `low_rank`."""
    y, x = unit_stride(y), unit_stride(x)
    (count, width), (num_groups, parts, rank, length) = y.shape, a.shape
    out = torch.empty(count, width, dtype=y.dtype, device=y.device)
    if not count:
        return out
    a, b, ranks, scales = a.contiguous(), b.contiguous(), ranks.contiguous(), scales.contiguous()
    groups, plan = groups.contiguous(), _plan(count, rank, x.element_size())
    room = max(16, power_of_2(rank))
    hidden = torch.empty(count, parts, room, dtype=x.dtype, device=x.device)
    tiles, most = ceil_div(count, plan["ROWS"]), min(plan["ROWS"], num_groups)
    shared = {
        "PARTS": parts,
        "WIDTH": room,
        "WIDEN": is_interpreting(),
        "ROWS": plan["ROWS"],
        "enable_fp_fusion": False,
    }
    down, up = ({**shared, **plan[name]} for name in ("down", "up"))
    grid = (tiles, min(most, plan["programs"][0]), parts * ceil_div(room, down["RANKS"]))
    _down_kernel[grid](x, a, groups, ranks, hidden, x.stride(0), count, length, rank, **down)
    ends = tuple(sum(sizes[: i + 1]) for i in range(parts))
    grid = (tiles, min(most, plan["programs"][1]), sum(ceil_div(size, up["COLUMNS"]) for size in sizes))
    biases = y if bias is None else bias.contiguous()
    tensors = (y, hidden, b, biases, groups, ranks, scales, out)
    _up_kernel[grid](*tensors, y.stride(0), count, width, rank, ENDS=ends, HAS_BIAS=bias is not None, **up)
    return out


def _plan(count: int, rank: int, element_size: int) -> dict[str, Any]:
    """Return the sizes of tiles, and how many programs share the groups of a tile in each kernel.

    fp32 has one plan for any number of rows: its bits may depend on the tile.
    """
    ranks = 16 if rank <= 16 else 32
    if is_interpreting():
        return {
            "ROWS": 16,
            "programs": (4, 2),
            "down": {"RANKS": ranks, "BLOCK_K": 32},
            "up": {"RANKS": 16, "COLUMNS": 32},
        }
    if element_size == 4:
        return {
            "ROWS": 16,
            "programs": (16, 16),
            "down": {"RANKS": ranks, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2},
            "up": {"RANKS": 16, "COLUMNS": 64, "num_warps": 4, "num_stages": 2},
        }
    if count <= FEW:
        return {
            "ROWS": 16,
            "programs": (16, 16),
            "down": {"RANKS": ranks, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4},
            "up": {"RANKS": 16, "COLUMNS": 128, "num_warps": 4, "num_stages": 2},
        }
    return {
        "ROWS": 64,
        "programs": (8, 1),
        "down": {"RANKS": ranks, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
        "up": {"RANKS": 16, "COLUMNS": 128, "num_warps": 4, "num_stages": 2},
    }
