# mypy: allow-untyped-defs
"""Experts in Triton: by dot products (decode) or grouped tiles (prompt)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2
from ..linear_triton import LARGEST_ROW, dot, unit_stride
from .permute_triton import places_of


@triton.jit
def _silu_mul(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _gate_up_decode_kernel(
    x_ptr,
    gate_up_ptr,
    ids_ptr,
    hidden_ptr,
    x_stride,
    stride_e,
    stride_f,
    K,
    C,
    F,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One (token, slot), a few rows of its expert: dot products whose order depends on nothing else."""
    follow(OVERLAP)
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = tl.arange(0, BLOCK_C)
    mask = (rows < F)[:, None] & (c < C)[None, :]
    gate_at = gate_up_ptr + expert * stride_e + rows[:, None] * stride_f + c[None, :]
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F * stride_f, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + (pair // K).to(tl.int64) * x_stride + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    hidden = _silu_mul(tl.sum(gate * x, 1), tl.sum(up * x, 1))
    tl.store(hidden_ptr + pair.to(tl.int64) * F + rows, hidden.to(hidden_ptr.dtype.element_ty), mask=rows < F)


@triton.jit
def _down_decode_kernel(
    hidden_ptr,
    down_ptr,
    weights_ptr,
    ids_ptr,
    y_ptr,
    stride_e,
    stride_c,
    C,
    F,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some channels of one token, all slots in order: weighted and added here, nothing goes through memory."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    f = tl.arange(0, BLOCK_F)
    mask = (channels < C)[:, None] & (f < F)[None, :]
    y = tl.zeros((BLOCK_C,), tl.float32)
    for slot in tl.static_range(K):  # unrolled: the rows of all experts are on their way at once
        pair = token * K + slot
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        down = tl.load(down_ptr + expert * stride_e + channels[:, None] * stride_c + f[None, :], mask=mask, other=0.0)
        hidden = tl.load(hidden_ptr + pair * F + f, mask=f < F, other=0.0).to(tl.float32)
        y += tl.sum(down.to(tl.float32) * hidden[None, :], 1) * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=channels < C)


@triton.jit
def _sort_kernel(ids_ptr, order_ptr, counts_ptr, P, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr):
    """The (token, slot) pairs of one expert, in order, behind those of the experts before it."""
    follow(OVERLAP)
    expert = tl.program_id(0)
    first, count = 0, 0
    for start in range(0, P, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        first += tl.sum((tl.load(ids_ptr + pair, mask=pair < P, other=expert) < expert).to(tl.int32), 0)
    for start in range(0, P, BLOCK_P):
        pair, is_mine, place = places_of(ids_ptr, start, P, expert, first + count, BLOCK_P)
        tl.store(order_ptr + place, pair, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def _tile_of(counts_ptr, E, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """The expert of this tile, and which of the pairs sorted by expert are its rows."""
    tile = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + index, mask=index < E, other=0)
    tiles = tl.cdiv(counts, ROWS)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (index < E)).to(tl.int32), 0)
    before = index < expert
    row = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    count = tl.sum(tl.where(index == expert, counts, 0), 0)
    return expert, tl.sum(tl.where(before, counts, 0), 0) + row, row < count


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
    expert, at, is_row = _tile_of(counts_ptr, E, BLOCK_E, ROWS)
    if expert < E:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pair = tl.load(order_ptr + at, mask=is_row, other=0)
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
        to = hidden_ptr + at.to(tl.int64)[:, None] * F + columns[None, :]
        mask = is_row[:, None] & (columns < F)[None, :]
        tl.store(to, _silu_mul(gate, up).to(hidden_ptr.dtype.element_ty), mask=mask)


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
    """Rows sorted by expert in, (token, slot) order out."""
    follow(OVERLAP)
    expert, at, is_row = _tile_of(counts_ptr, E, BLOCK_E, ROWS)
    if expert < E:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        down_at = down_ptr + expert.to(tl.int64) * stride_e + columns[None, :] * stride_c
        hidden_at = hidden_ptr + at.to(tl.int64)[:, None] * F
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, F, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            hidden = tl.load(hidden_at + f[None, :], mask=is_row[:, None] & (f < F)[None, :], other=0.0)
            down = tl.load(down_at + f[:, None], mask=(columns < C)[None, :] & (f < F)[:, None], other=0.0)
            part = dot(hidden, down, part, WIDEN)
        pair = tl.load(order_ptr + at, mask=is_row, other=0).to(tl.int64)
        mask = is_row[:, None] & (columns < C)[None, :]
        tl.store(parts_ptr + pair[:, None] * C + columns[None, :], part, mask=mask)


@triton.jit
def _combine_kernel(parts_ptr, weights_ptr, y_ptr, K, C, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for slot in range(K):
        pair = token * K + slot
        part = tl.load(parts_ptr + pair * C + channels, mask=channels < C, other=0.0)
        y += part * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=channels < C)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, rows: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not ids.numel():
        return y.zero_()
    x, gate_up, down = (unit_stride(t) for t in (x, gate_up, down))
    weights, ids = weights.float().contiguous(), ids.contiguous()
    if rows == "decode":
        _by_token(x, gate_up, down, weights, ids, y)
    else:
        _by_expert(x, gate_up, down, weights, ids, y, rows)
    return y


def _by_token(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    (count, slots), (_, channels, width) = ids.shape, down.shape
    hidden = torch.empty(count * slots, width, dtype=x.dtype, device=x.device)
    inner, outer = decode_plan(channels, width, x.element_size())
    _gate_up_decode_kernel[(count * slots, ceil_div(width, inner["BLOCK_F"]))](
        x, gate_up, ids, hidden, x.stride(0), *gate_up.stride()[:2], slots, channels, width, **inner, **overlap(x)
    )
    _down_decode_kernel[(count, ceil_div(channels, outer["BLOCK_C"]))](
        hidden, down, weights, ids, y, *down.stride()[:2], channels, width, K=slots, **outer, **overlap(x)
    )


def decode_plan(channels: int, width: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of both products, by the weights alone: how a sum is cut decides its bits."""
    block_c, block_f = power_of_2(channels), power_of_2(width)
    inner = {"BLOCK_F": 1, "BLOCK_C": block_c, "num_warps": max(1, min(8, block_c * element_size // 1024))}
    outer = {"BLOCK_C": 1, "BLOCK_F": block_f, "num_warps": max(1, block_f * element_size // LARGEST_ROW)}
    return inner, outer


def _combine(parts: Tensor, weights: Tensor, y: Tensor) -> None:
    block = min(1024, power_of_2(y.shape[1]))
    _combine_kernel[(y.shape[0], ceil_div(y.shape[1], block))](
        parts, weights, y, weights.shape[1], y.shape[1], BLOCK_C=block, num_warps=4, **overlap(y)
    )


def _by_expert(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor, rows: str) -> None:
    pairs, (number, channels, width) = ids.numel(), down.shape
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    counts = torch.empty(number, dtype=torch.int32, device=x.device)
    _sort_kernel[(number,)](ids, order, counts, pairs, BLOCK_P=min(4096, power_of_2(pairs)), num_warps=4, **overlap(x))
    hidden = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, channels, dtype=torch.float32, device=x.device)
    inner, outer = tile_plan(rows, x.element_size())
    shared = {"BLOCK_E": power_of_2(number), "WIDEN": is_interpreting(), **overlap(x)}
    tiles = min(pairs, ceil_div(pairs, inner["ROWS"]) + number)  # every expert may have one that is not full
    _gate_up_kernel[(tiles, ceil_div(width, inner["COLUMNS"]))](
        x,
        gate_up,
        order,
        counts,
        hidden,
        x.stride(0),
        *gate_up.stride()[:2],
        ids.shape[1],
        channels,
        width,
        number,
        **shared,
        **inner,
    )
    tiles = min(pairs, ceil_div(pairs, outer["ROWS"]) + number)
    _down_kernel[(tiles, ceil_div(channels, outer["COLUMNS"]))](
        hidden, down, order, counts, parts, *down.stride()[:2], channels, width, number, **shared, **outer
    )
    _combine(parts, weights, y)


def tile_plan(rows: str, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of both products, by class and dtype alone. Two warps multiply with 16 rows at an instruction, eight with 64."""
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_C": 32}, {"ROWS": 16, "COLUMNS": 32, "BLOCK_F": 32}
    if element_size == 4:
        small = {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}
        return small | {"BLOCK_C": 32}, small | {"BLOCK_F": 32}
    if rows == "batch":
        small = {"ROWS": 16, "COLUMNS": 32, "num_warps": 2, "num_stages": 3}
        return small | {"BLOCK_C": 128}, small | {"BLOCK_F": 256}
    large = {"ROWS": 128, "num_warps": 8, "num_stages": 3}
    return large | {"COLUMNS": 128, "BLOCK_C": 64}, large | {"COLUMNS": 128, "BLOCK_F": 64}
