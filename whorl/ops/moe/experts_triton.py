# mypy: allow-untyped-defs
"""Experts in Triton: one program per (token, choice) for few tokens, tiles of one expert's tokens for many.

Both give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2
from .._varied import is_varied
from ..linear_triton import dot, unit_stride
from .permute_triton import find_places

FEW_TOKENS = 4  # up to here each token reads the weights of its experts for itself
# Average rows of an expert up to which tiles have 16, 32 and 64 rows, chosen by time on an H200.
FEW_ROWS, SOME_ROWS, MANY_ROWS = 8, 24, 64
FEW_PAIRS, MANY_PAIRS = 512, 4096  # (token, choice) pairs that are sorted at once


@triton.jit
def _activate(gate, up, dtype: tl.constexpr):
    """Round gate and up to `dtype`, as a separate matmul would, and return silu(gate) * up, rounded to it as well."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate / (1 + tl.exp(-gate)) * up).to(dtype)


@launched
@triton.jit
def _gate_up_few_kernel(
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
    COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply one (token, choice) by a tile of its expert's weight.

    The weight is the left operand; the token is column 0 of a right operand padded to 16 columns.
    """
    begin(OVERLAP)
    follow(OVERLAP)
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    columns, token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 16)[None, :]
    x_at = x_ptr + (pair // K).to(tl.int64) * x_stride
    gate_at = gate_up_ptr + expert * stride_e + (columns % F)[:, None] * stride_f
    gate = tl.zeros((COLUMNS, 16), tl.float32)
    up = tl.zeros((COLUMNS, 16), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        if EVEN:
            x = tl.load(x_at + c[:, None] + token * 0, mask=token == 0, other=0.0)
            gate_weight, up_weight = tl.load(gate_at + c[None, :]), tl.load(gate_at + F * stride_f + c[None, :])
        else:
            x = tl.load(x_at + c[:, None], mask=(c < C)[:, None] & (token == 0), other=0.0)
            mask = (c < C)[None, :]
            gate_weight = tl.load(gate_at + c[None, :], mask=mask, other=0.0)
            up_weight = tl.load(gate_at + F * stride_f + c[None, :], mask=mask, other=0.0)
        gate, up = dot(gate_weight, x, gate, WIDEN), dot(up_weight, x, up, WIDEN)
    to = hidden_ptr + pair.to(tl.int64) * F + columns[:, None] + token
    mask = (columns < F)[:, None] & (token == 0)
    tl.store(to, _activate(gate, up, hidden_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _down_few_kernel(
    hidden_ptr,
    down_ptr,
    ids_ptr,
    parts_ptr,
    stride_e,
    stride_c,
    C,
    F,
    COLUMNS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a tile of channels of one (token, choice).

    Another kernel sums the choices: all choices of a token in one program would leave multiprocessors idle.
    """
    begin(OVERLAP)
    follow(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    channels, token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 16)[None, :]
    down_at = down_ptr + expert * stride_e + (channels % C)[:, None] * stride_c
    part = tl.zeros((COLUMNS, 16), tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        down = tl.load(down_at + f[None, :], mask=(f < F)[None, :], other=0.0)
        hidden = tl.load(hidden_ptr + pair * F + f[:, None], mask=(f < F)[:, None] & (token == 0), other=0.0)
        part = dot(down, hidden, part, WIDEN)
    to = parts_ptr + pair * C + channels[:, None] + token
    tl.store(to, part.to(parts_ptr.dtype.element_ty), mask=(channels < C)[:, None] & (token == 0))


@triton.jit
def _add_weighted(part, weight, y):
    """Return y + weight * part, rounded once."""
    return tl.fma(part.to(tl.float32), tl.full(part.shape, weight, tl.float32), y)


@launched
@triton.jit
def _sort_kernel(ids_ptr, order_ptr, counts_ptr, P, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr):
    """Write the (token, choice) pairs of one expert, in order, after those of all lower experts."""
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
def _find_tile(tile, counts_ptr, E, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
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
    expert, position, is_row = _find_tile(tl.program_id(0), counts_ptr, E, BLOCK_E, ROWS)
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
        tl.store(to, _activate(gate, up, hidden_ptr.dtype.element_ty), mask=mask)


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
    expert, position, is_row = _find_tile(tl.program_id(1), counts_ptr, E, BLOCK_E, ROWS)
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


@launched
@triton.jit
def _combine_kernel(parts_ptr, weights_ptr, y_ptr, C, K: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for choice in tl.static_range(K):  # unrolled so that all loads are issued together
        pair = token * K + choice
        part = tl.load(parts_ptr + pair * C + channels, mask=channels < C, other=0.0)
        y = _add_weighted(part, tl.load(weights_ptr + pair), y)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=channels < C)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not ids.numel():
        return y.zero_()
    x, gate_up, down = (unit_stride(t) for t in (x, gate_up, down))
    weights, ids = weights.float().contiguous(), ids.contiguous()
    if len(x) <= FEW_TOKENS and x.element_size() == 2:
        _run_by_token(x, gate_up, down, weights, ids, y)
    else:
        _run_by_expert(x, gate_up, down, weights, ids, y)
    return y


def _run_by_token(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    """Write `experts` of few tokens to y: every (token, choice) pair reads its expert's weights by itself."""
    pairs, (_, channels, width) = ids.numel(), down.shape
    hidden, parts = (torch.empty(pairs, n, dtype=x.dtype, device=x.device) for n in (width, channels))
    gate_up_plan, down_plan = few_plan(channels)
    options = {"WIDEN": is_interpreting(), "enable_fp_fusion": False, **overlap(x)}
    _gate_up_few_kernel[(pairs, ceil_div(width, gate_up_plan["COLUMNS"]))](
        x,
        gate_up,
        ids,
        hidden,
        x.stride(0),
        *gate_up.stride()[:2],
        ids.shape[1],
        channels,
        width,
        **gate_up_plan,
        **options,
    )
    _down_few_kernel[(pairs, ceil_div(channels, down_plan["COLUMNS"]))](
        hidden, down, ids, parts, *down.stride()[:2], channels, width, **down_plan, **options
    )
    _combine(parts, weights, y)


def few_plan(channels: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tile sizes of the two kernels for few tokens; they affect speed alone."""
    if is_interpreting():
        gate_up_plan, down_plan = {"COLUMNS": 16, "BLOCK_C": 32}, {"COLUMNS": 16, "BLOCK_F": 32}
    else:
        gate_up_plan = {"COLUMNS": 32, "BLOCK_C": 128, "num_warps": 2, "num_stages": 4}
        down_plan = {"COLUMNS": 128, "BLOCK_F": 64, "num_warps": 4, "num_stages": 5}
    return gate_up_plan | {"EVEN": channels % gate_up_plan["BLOCK_C"] == 0}, down_plan


def _combine(parts: Tensor, weights: Tensor, y: Tensor) -> None:
    """Write to y [T, C] the weighted sum of parts [T * K, C] over each token's choices, in order."""
    block = min(1024, power_of_2(y.shape[1]))
    _combine_kernel[(y.shape[0], ceil_div(y.shape[1], block))](
        parts,
        weights,
        y,
        y.shape[1],
        K=weights.shape[1],
        BLOCK_C=block,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap(y),
    )


def _run_by_expert(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    """Write `experts` of many tokens to y: pairs are sorted by expert and multiplied in tiles."""
    pairs, (num_experts, channels, width) = ids.numel(), down.shape
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    _sort_kernel[(num_experts,)](ids, order, counts, pairs, BLOCK_P=sort_block(pairs), num_warps=4, **overlap(x))
    hidden, parts = (torch.empty(pairs, n, dtype=x.dtype, device=x.device) for n in (width, channels))
    gate_up_plan, down_plan = tile_plan(pairs / num_experts, x.element_size())
    options = {"BLOCK_E": power_of_2(num_experts), "WIDEN": is_interpreting(), "enable_fp_fusion": False, **overlap(x)}
    # Every expert may have one partly filled tile.
    tiles = min(pairs, ceil_div(pairs, gate_up_plan["ROWS"]) + num_experts)
    _gate_up_kernel[(tiles, ceil_div(width, gate_up_plan["COLUMNS"]))](
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
        num_experts,
        **options,
        **gate_up_plan,
    )
    tiles = min(pairs, ceil_div(pairs, down_plan["ROWS"]) + num_experts)
    _down_kernel[(ceil_div(channels, down_plan["COLUMNS"]), tiles)](
        hidden, down, order, counts, parts, *down.stride()[:2], channels, width, num_experts, **options, **down_plan
    )
    _combine(parts, weights, y)


def sort_block(pairs: int) -> int:
    """Return how many (token, choice) pairs are sorted at once."""
    if is_varied():
        return FEW_PAIRS if pairs <= FEW_PAIRS else MANY_PAIRS
    return min(MANY_PAIRS, power_of_2(pairs))


def tile_plan(rows: float, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiles of both matmuls; they affect speed alone, as in `linear_triton.tile_plan`.

    rows: average rows of an expert. Up to MANY_ROWS the time is that of reading the weights.
    """
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_C": 32}, {"ROWS": 16, "COLUMNS": 32, "BLOCK_F": 32}
    if element_size == 4:
        return _plan(32, 32, 32, 4, 2, "BLOCK_C"), _plan(32, 32, 32, 4, 2, "BLOCK_F")
    if rows <= FEW_ROWS:
        return _plan(16, 64, 128, 4, 3, "BLOCK_C"), _plan(16, 64, 128, 4, 4, "BLOCK_F")
    if rows <= SOME_ROWS:
        return _plan(32, 64, 128, 4, 2, "BLOCK_C"), _plan(32, 64, 128, 4, 3, "BLOCK_F")
    if rows <= MANY_ROWS:
        return _plan(64, 64, 64, 4, 3, "BLOCK_C"), _plan(64, 128, 64, 8, 3, "BLOCK_F")
    return _plan(128, 128, 64, 8, 4, "BLOCK_C"), _plan(128, 256, 64, 8, 4, "BLOCK_F")


def _plan(rows: int, columns: int, block: int, num_warps: int, num_stages: int, name: str) -> dict[str, int]:
    """Return the constants of a kernel; name: that of the block of the sum."""
    return {"ROWS": rows, "COLUMNS": columns, name: block, "num_warps": num_warps, "num_stages": num_stages}
