# mypy: allow-untyped-defs
"""Experts in Triton for many tokens: (token, choice) pairs are sorted by expert and multiplied in tiles."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2
from .._varied import is_varied
from ..linear_triton import dot
from .permute_triton import find_places

# Average rows of an expert up to which tiles have 16, 32 and 64 rows, chosen by time on an H200.
FEW_ROWS, SOME_ROWS, MANY_ROWS = 8, 24, 64
FEW_PAIRS, MANY_PAIRS = 512, 4096  # (token, choice) pairs that are sorted at once


@triton.jit
def activate(gate, up, dtype: tl.constexpr):
    """Round gate and up to `dtype`, as a separate matmul would, and return silu(gate) * up, rounded to it as well."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate / (1 + tl.exp(-gate)) * up).to(dtype)


@launched
@triton.jit
def _sort_kernel(ids_ptr, order_ptr, counts_ptr, P, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr):
    """Write the (token, choice) pairs of one expert, in order, after those of all lower experts."""
    begin(OVERLAP)
    follow(OVERLAP)
    expert = tl.program_id(0)
    first, count = 0, 0
    for start in range(0, P, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        first += tl.sum((tl.load(ids_ptr + pair, mask=pair < P, other=expert) < expert).to(tl.int32), 0)
    for start in range(0, P, BLOCK_P):
        pair, is_mine, place = find_places(ids_ptr, start, P, expert, first + count, BLOCK_P)
        tl.store(order_ptr + place, pair, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def find_tile(tile, counts_ptr, E, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert (E: none), the positions of its rows among the sorted pairs, and their mask."""
    index = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + index, mask=index < E, other=0)
    tiles = tl.cdiv(counts, ROWS)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (index < E)).to(tl.int32), 0)
    before = index < expert
    row = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    count = tl.sum(tl.where(index == expert, counts, 0), 0)
    return expert, tl.sum(tl.where(before, counts, 0), 0) + row, row < count


@launched
@triton.jit
def _gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    order_ptr,
    counts_ptr,
    hidden_ptr,
    x_stride,
    stride_e,
    stride_f,
    K,
    C,
    F,
    E,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    expert, position, is_row = find_tile(tl.program_id(0), counts_ptr, E, BLOCK_E, ROWS)
    if expert < E:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pair = tl.load(order_ptr + position, mask=is_row, other=0)
        x_at = x_ptr + (pair // K).to(tl.int64)[:, None] * x_stride
        gate_at = gate_up_ptr + expert.to(tl.int64) * stride_e + columns[None, :] * stride_f
        up_at = gate_at + F * stride_f
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            x = tl.load(x_at + c[None, :], mask=is_row[:, None] & (c < C)[None, :], other=0.0)
            mask = (columns < F)[None, :] & (c < C)[:, None]
            gate = dot(x, tl.load(gate_at + c[:, None], mask=mask, other=0.0), gate, WIDEN)
            up = dot(x, tl.load(up_at + c[:, None], mask=mask, other=0.0), up, WIDEN)
        to = hidden_ptr + position.to(tl.int64)[:, None] * F + columns[None, :]
        mask = is_row[:, None] & (columns < F)[None, :]
        tl.store(to, activate(gate, up, hidden_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _down_kernel(
    hidden_ptr,
    down_ptr,
    order_ptr,
    counts_ptr,
    parts_ptr,
    stride_e,
    stride_c,
    C,
    F,
    E,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Read rows sorted by expert and write results in (token, choice) order."""
    follow(OVERLAP)
    expert, position, is_row = find_tile(tl.program_id(1), counts_ptr, E, BLOCK_E, ROWS)
    if expert < E:
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        down_at = down_ptr + expert.to(tl.int64) * stride_e + columns[None, :] * stride_c
        hidden_at = hidden_ptr + position.to(tl.int64)[:, None] * F
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, F, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            hidden = tl.load(hidden_at + f[None, :], mask=is_row[:, None] & (f < F)[None, :], other=0.0)
            down = tl.load(down_at + f[:, None], mask=(columns < C)[None, :] & (f < F)[:, None], other=0.0)
            part = dot(hidden, down, part, WIDEN)
        pair = tl.load(order_ptr + position, mask=is_row, other=0).to(tl.int64)
        mask = is_row[:, None] & (columns < C)[None, :]
        to = parts_ptr + pair[:, None] * C + columns[None, :]
        tl.store(to, part.to(parts_ptr.dtype.element_ty), mask=mask)


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the (token, choice) pairs of ids [T, K] sorted by expert, and how many each expert has."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](ids, order, counts, pairs, BLOCK_P=sort_block(pairs), num_warps=4, **overlap(ids))
    return order, counts


def sort_block(pairs: int) -> int:
    """Return how many (token, choice) pairs are sorted at once."""
    if is_varied():
        return FEW_PAIRS if pairs <= FEW_PAIRS else MANY_PAIRS
    return min(MANY_PAIRS, power_of_2(pairs))


def run_gate_up(
    x: Tensor, gate_up: Tensor, order: Tensor, counts: Tensor, hidden: Tensor, choices: int, plan: dict[str, int]
) -> None:
    """Write silu(gate) * up of the pairs, in the order of their experts, to hidden [pairs, F]."""
    width = hidden.shape[1]
    _gate_up_kernel[(_num_tiles(order, counts, plan), ceil_div(width, plan["COLUMNS"]))](
        x,
        gate_up,
        order,
        counts,
        hidden,
        x.stride(0),
        *gate_up.stride()[:2],
        choices,
        x.shape[1],
        width,
        **_tile_options(x, counts),
        **plan,
    )


def run_down(hidden: Tensor, down: Tensor, order: Tensor, counts: Tensor, parts: Tensor, plan: dict[str, int]) -> None:
    """Write the products of the rows of hidden to parts [pairs, C], in the order of the pairs."""
    channels = parts.shape[1]
    _down_kernel[(ceil_div(channels, plan["COLUMNS"]), _num_tiles(order, counts, plan))](
        hidden,
        down,
        order,
        counts,
        parts,
        *down.stride()[:2],
        channels,
        hidden.shape[1],
        **_tile_options(hidden, counts),
        **plan,
    )


def _num_tiles(order: Tensor, counts: Tensor, plan: dict[str, int]) -> int:
    """Return how many tiles the pairs have at most: every expert may have one partly filled tile."""
    return min(len(order), ceil_div(len(order), plan["ROWS"]) + len(counts))


def _tile_options(x: Tensor, counts: Tensor) -> dict[str, Any]:
    num_experts = len(counts)
    sizes = {"E": num_experts, "BLOCK_E": power_of_2(num_experts), "WIDEN": is_interpreting()}
    return sizes | {"enable_fp_fusion": False, **overlap(x)}


def tile_plan(rows: float, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiles of both matmuls; they affect speed alone, as in `linear_triton.tile_plan`.

    rows: average rows of an expert. Up to MANY_ROWS the time is that of reading the weights.
    """
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_C": 32}, {"ROWS": 16, "COLUMNS": 32, "BLOCK_F": 32}
    if element_size == 4:
        return plan(32, 32, 32, 4, 2, "BLOCK_C"), plan(32, 32, 32, 4, 2, "BLOCK_F")
    if rows <= FEW_ROWS:
        return plan(16, 64, 128, 4, 3, "BLOCK_C"), plan(16, 64, 128, 4, 4, "BLOCK_F")
    if rows <= SOME_ROWS:
        return plan(32, 64, 128, 4, 2, "BLOCK_C"), plan(32, 64, 128, 4, 3, "BLOCK_F")
    if rows <= MANY_ROWS:
        return plan(64, 64, 64, 4, 3, "BLOCK_C"), plan(64, 128, 64, 8, 3, "BLOCK_F")
    return plan(128, 128, 64, 8, 4, "BLOCK_C"), plan(128, 256, 64, 8, 4, "BLOCK_F")


def plan(rows: int, columns: int, block: int, num_warps: int, num_stages: int, name: str) -> dict[str, int]:
    """Return the constants of a kernel; name: that of the block of the sum."""
    return {"ROWS": rows, "COLUMNS": columns, name: block, "num_warps": num_warps, "num_stages": num_stages}
