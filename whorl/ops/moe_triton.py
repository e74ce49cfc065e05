"""Mixture-of-experts kernels: routing a row at a time, experts by dot products (decode) or grouped tiles (prompt)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._rows import ceil_div, power_of_2
from .linear_triton import dot, unit_stride


@triton.jit
def _highest(values, ids, NONE: tl.constexpr):
    """The highest value of a 2-D block and its id, the lowest of equals."""
    best = tl.max(tl.max(values, 1), 0)
    return best, tl.min(tl.min(tl.where(values == best, ids, NONE), 1), 0)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    stride,
    scale,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row, its experts as [groups, experts of a group]."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    ids = group * SIZE + member
    is_real = (group < GROUPS) & (member < SIZE)
    logits = tl.load(logits_ptr + row * stride + ids, mask=is_real, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = 1 / (1 + tl.exp(-logits))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + ids, mask=is_real, other=0.0).to(tl.float32)
    choice = tl.where(is_real, choice, float("-inf"))
    NONE: tl.constexpr = BLOCK_G * (SIZE + BLOCK_S)
    if GROUPS > 1:
        best = tl.max(choice, 1)[:, None]
        if HAS_BIAS:  # a group is as good as its best two
            first = tl.min(tl.where(choice == best, member, BLOCK_S), 1)[:, None]
            second = tl.max(tl.where(member == first, float("-inf"), choice), 1)[:, None]
            best = best + (second if SIZE > 1 else 0.0)
        best = tl.where(group < GROUPS, best, float("-inf"))
        is_kept = group < 0
        for _ in range(TOP_GROUPS):
            _, winner = _highest(best, group, NONE)
            is_kept = is_kept | (group == winner)
            best = tl.where(group == winner, float("-inf"), best)
        choice = tl.where(is_kept, choice, float("-inf"))
    slot = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    total = 0.0
    for i in range(K):
        _, winner = _highest(choice, ids, NONE)
        weight = tl.sum(tl.sum(tl.where(ids == winner, scores, 0.0), 1), 0)
        weights = tl.where(slot == i, weight, weights)
        chosen = tl.where(slot == i, winner, chosen)
        choice = tl.where(ids == winner, float("-inf"), choice)
        total += weight
    if RENORMALIZE:
        weights = weights / tl.maximum(total, 1e-20)
    tl.store(weights_ptr + row * K + slot, weights * scale, mask=slot < K)
    tl.store(ids_ptr + row * K + slot, chosen, mask=slot < K)


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
):
    """One (token, slot), some of the expert's rows: dot products whose order depends on nothing else."""
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    x_at = x_ptr + (pair // K).to(tl.int64) * x_stride
    gate_at = gate_up_ptr + expert * stride_e + rows[:, None] * stride_f
    up_at = gate_at + F * stride_f
    gate = tl.zeros((BLOCK_F, BLOCK_C), tl.float32)
    up = tl.zeros((BLOCK_F, BLOCK_C), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_at + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        mask = (rows < F)[:, None] & (c < C)[None, :]
        gate += tl.load(gate_at + c[None, :], mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(up_at + c[None, :], mask=mask, other=0.0).to(tl.float32) * x
    hidden = _silu_mul(tl.sum(gate, 1), tl.sum(up, 1))
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
    K,
    C,
    F,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Some channels of one token, all slots in order: weighted and added here, nothing goes through memory."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for slot in range(K):
        pair = token * K + slot
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        down_at = down_ptr + expert * stride_e + channels[:, None] * stride_c
        part = tl.zeros((BLOCK_C, BLOCK_F), tl.float32)
        for start in range(0, F, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            hidden = tl.load(hidden_ptr + pair * F + f, mask=f < F, other=0.0).to(tl.float32)
            mask = (channels < C)[:, None] & (f < F)[None, :]
            part += tl.load(down_at + f[None, :], mask=mask, other=0.0).to(tl.float32) * hidden[None, :]
        y += tl.sum(part, 1) * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=channels < C)


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
def _gate_up_prompt_kernel(
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
):
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
def _down_prompt_kernel(
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
):
    """Rows sorted by expert in, (token, slot) order out."""
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
def _combine_kernel(parts_ptr, weights_ptr, y_ptr, K, C, BLOCK_C: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for slot in range(K):
        pair = token * K + slot
        part = tl.load(parts_ptr + pair * C + channels, mask=channels < C, other=0.0)
        y += part * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=channels < C)


def route(
    logits: Tensor,
    k: int,
    bias: Tensor | None,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    logits = unit_stride(logits)
    count, experts = logits.shape
    weights = torch.empty(count, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, k, dtype=torch.int32, device=logits.device)
    if count:
        _route_kernel[(count,)](
            logits,
            logits if bias is None else bias.contiguous(),
            weights,
            ids,
            logits.stride(0),
            float(scale),
            SIZE=experts // num_groups,
            GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            K=k,
            HAS_BIAS=bias is not None,
            SOFTMAX=scoring == "softmax",
            RENORMALIZE=renormalize,
            BLOCK_G=power_of_2(num_groups),
            BLOCK_S=power_of_2(experts // num_groups),
            BLOCK_K=power_of_2(k),
            num_warps=1,
        )
    return weights, ids


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, rows: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not ids.numel():
        return y.zero_()
    run = _decode if rows == "decode" else _prompt
    x, gate_up, down = (unit_stride(t) for t in (x, gate_up, down))
    run(x, gate_up, down, weights.float().contiguous(), ids.contiguous(), y)
    return y


def _decode(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    count, slots = ids.shape
    width = down.shape[2]
    hidden = torch.empty(count * slots, width, dtype=x.dtype, device=x.device)
    _gate_up_decode_kernel[(count * slots, ceil_div(width, 8))](
        x,
        gate_up,
        ids,
        hidden,
        x.stride(0),
        *gate_up.stride()[:2],
        slots,
        x.shape[1],
        width,
        BLOCK_F=8,
        BLOCK_C=64 if is_interpreting() else 512,
        num_warps=4,
    )
    _down_decode_kernel[(count, ceil_div(x.shape[1], 8))](
        hidden,
        down,
        weights,
        ids,
        y,
        *down.stride()[:2],
        slots,
        x.shape[1],
        width,
        BLOCK_C=8,
        BLOCK_F=64 if is_interpreting() else 256,
        num_warps=4,
    )


def _prompt(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    pairs, (number, channels, width) = ids.numel(), down.shape
    flat = ids.flatten().long()
    order = torch.sort(flat, stable=True).indices.int()
    counts = torch.zeros(number, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    hidden = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, channels, dtype=torch.float32, device=x.device)
    plan = _tiles(x.element_size())
    block = plan.pop("block")
    tiles = ceil_div(pairs, plan["ROWS"]) + number  # every expert may have one that is not full
    shared = {"BLOCK_E": power_of_2(number), "WIDEN": is_interpreting(), **plan}
    _gate_up_prompt_kernel[(tiles, ceil_div(width, plan["COLUMNS"]))](
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
        BLOCK_C=block,
        **shared,
    )
    _down_prompt_kernel[(tiles, ceil_div(channels, plan["COLUMNS"]))](
        hidden, down, order, counts, parts, *down.stride()[:2], channels, width, number, BLOCK_F=block, **shared
    )
    block = min(1024, power_of_2(channels))
    _combine_kernel[(x.shape[0], ceil_div(channels, block))](
        parts, weights, y, ids.shape[1], channels, BLOCK_C=block, num_warps=4
    )


def _tiles(element_size: int) -> dict[str, int]:
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "block": 32}
    if element_size == 4:
        return {"ROWS": 32, "COLUMNS": 32, "block": 32, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 64, "COLUMNS": 128, "block": 64, "num_warps": 8, "num_stages": 3}
