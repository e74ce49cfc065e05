# mypy: allow-untyped-defs
"""Kernels of the indexer's loss over every visible key, for a chunk of queries with scores and target in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, unit_stride
from ..linear_triton import dot
from .key_gradient_triton import add_dk, gradient_plan, load_query, split_dim, store_query_gradients
from .scores_triton import bounds_of, key_block, row_strides, scores_into


@triton.jit
def _dense_target_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    starts_ptr,
    ends_ptr,
    positions_ptr,
    target_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_s,
    k_stride_h,
    scale,
    T,
    S,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    MAIN_D: tl.constexpr,
    REST_D: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute a tile of queries by keys, looping over the heads."""
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    keys, exists, positions, lowest, highest = key_block(
        positions_ptr, tl.program_id(0) * BLOCK_S, S, BLOCK_S, HAS_POSITIONS
    )
    starts = tl.load(starts_ptr + tokens, mask=tokens < T, other=2147483647)
    ends = tl.load(ends_ptr + tokens, mask=tokens < T, other=-2147483648)
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    if (lowest < tl.max(ends, 0)) & (highest >= tl.min(starts, 0)):
        main_channels, rest_channels = tl.arange(0, MAIN_D), MAIN_D + tl.arange(0, REST_D)
        # Rows past the end wrap around to valid memory, so that loads need no mask; their results are not stored.
        q_at = q_ptr + (tokens % T).to(tl.int64)[:, None] * q_stride_t
        k_at = k_ptr + (keys % S).to(tl.int64)[:, None] * k_stride_s
        for head in tl.range(0, H):
            q_head, k_head = q_at + head * q_stride_h, k_at + head // (H // HK) * k_stride_h
            q = tl.load(q_head + main_channels[None, :], mask=(main_channels < D)[None, :], other=0.0)
            k = tl.load(k_head + main_channels[None, :], mask=(main_channels < D)[None, :], other=0.0)
            logits = dot(q, tl.trans(k), tl.zeros((BLOCK_T, BLOCK_S), tl.float32), WIDEN)
            if MAIN_D < D:
                q = tl.load(q_head + rest_channels[None, :], mask=(rest_channels < D)[None, :], other=0.0)
                k = tl.load(k_head + rest_channels[None, :], mask=(rest_channels < D)[None, :], other=0.0)
                logits = dot(q, tl.trans(k), logits, WIDEN)
            lse = tl.load(lse_ptr + (tokens % T).to(tl.int64) * H + head)
            total += tl.exp(logits * scale - lse[:, None])
        visible = (positions[None, :] >= starts[:, None]) & (positions[None, :] < ends[:, None])
        total = tl.where(visible, total, 0.0)
    at = target_ptr + tokens.to(tl.int64)[:, None] * S + keys[None, :]
    tl.store(at, total, mask=(tokens < T)[:, None] & exists[None, :])


def target(q: Tensor, k: Tensor, lse: Tensor, scale: float, **bounds: Tensor | None) -> Tensor:
    starts, ends, key_positions = bounds_of(q, k, **bounds)
    q, k = unit_stride(q), unit_stride(k)
    out = q.new_empty(q.shape[0], k.shape[0], dtype=torch.float32)
    if not out.numel() or not q.shape[1]:
        return out.zero_()
    plan = target_plan(q.shape[2], q.element_size())
    _dense_target_kernel[(ceil_div(k.shape[0], plan["BLOCK_S"]), ceil_div(q.shape[0], plan["BLOCK_T"]))](
        q,
        k,
        lse.contiguous(),
        starts.contiguous(),
        ends.contiguous(),
        ends if key_positions is None else key_positions.contiguous(),
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        scale,
        q.shape[0],
        k.shape[0],
        H=q.shape[1],
        HK=k.shape[1],
        D=q.shape[2],
        HAS_POSITIONS=key_positions is not None,
        WIDEN=is_interpreting(),
        **plan,
    )
    return out


def target_plan(dim: int, element_size: int) -> dict[str, int]:
    main_channels, rest_channels = split_dim(dim)
    sizes = {"MAIN_D": main_channels, "REST_D": rest_channels}
    if is_interpreting():
        return {**sizes, "BLOCK_T": 16, "BLOCK_S": 16}
    if element_size == 4 or dim > 256:
        return {**sizes, "BLOCK_T": 32, "BLOCK_S": 32, "num_warps": 4, "num_stages": 1}
    return {**sizes, "BLOCK_T": 128, "BLOCK_S": 128, "num_warps": 8, "num_stages": 2}


@triton.jit
def _rows_kernel(
    scores_ptr,
    target_ptr,
    starts_ptr,
    ends_ptr,
    positions_ptr,
    loss_ptr,
    S,
    HAS_POSITIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute one query's loss, and overwrite its scores with their gradients, 0 for keys that it does not see."""
    row = tl.program_id(0).to(tl.int64)
    first, stop = tl.load(starts_ptr + row), tl.load(ends_ptr + row)
    scores_ptr += row * S
    target_ptr += row * S
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total, mass = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for tile in range(0, S, TILE):
        at, visible = _visible(positions_ptr, tile, S, first, stop, HAS_POSITIONS, TILE)
        scores = tl.load(scores_ptr + at, mask=at < S, other=0.0)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.exp(scores - shift)
        mass += tl.load(target_ptr + at, mask=at < S, other=0.0)
        top = new_top
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    log_total = tl.log(tl.maximum(tl.sum(total * tl.exp(top - highest), 0), 1e-37))
    all_mass = tl.sum(mass, 0)
    has_mass = tl.where(all_mass > 0, 1.0, 0.0)
    inverse = tl.div_rn(has_mass, tl.where(all_mass > 0, all_mass, 1.0))
    loss = tl.zeros((TILE,), tl.float32)
    for tile in range(0, S, TILE):
        at, visible = _visible(positions_ptr, tile, S, first, stop, HAS_POSITIONS, TILE)
        log_q = tl.load(scores_ptr + at, mask=at < S, other=0.0) - highest - log_total
        p = tl.load(target_ptr + at, mask=at < S, other=0.0) * inverse
        loss += tl.where(visible & (p > 0), p * (tl.log(tl.where(p > 0, p, 1.0)) - log_q), 0.0)
        dscores = tl.where(visible, tl.exp(tl.where(visible, log_q, 0.0)) - p, 0.0) * has_mass
        tl.store(scores_ptr + at, dscores, mask=at < S)
    tl.store(loss_ptr + row, tl.sum(loss, 0))


@triton.jit
def _visible(positions_ptr, tile, S, first, stop, HAS_POSITIONS: tl.constexpr, TILE: tl.constexpr):
    at = tile + tl.arange(0, TILE)
    positions = tl.load(positions_ptr + at, mask=at < S, other=0) if HAS_POSITIONS else at
    return at, (at < S) & (positions >= first) & (positions < stop)


@triton.jit
def _dense_dq_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    dscores_ptr,
    starts_ptr,
    ends_ptr,
    dq_ptr,
    dweights_ptr,
    q_stride_t,
    q_stride_h,
    k_stride,
    weights_stride,
    grad_scale,
    S,
    HI: tl.constexpr,
    D: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIFT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dq and dweights of one query over every block of keys that it may see."""
    token = tl.program_id(0).to(tl.int64)
    first, stop = 0, S
    if not HAS_POSITIONS:
        first = tl.maximum(tl.load(starts_ptr + token), 0) // BLOCK_S * BLOCK_S
        stop = tl.minimum(tl.load(ends_ptr + token), S)
    heads, channels, inside, q, weights = load_query(
        q_ptr, weights_ptr, token, q_stride_t, q_stride_h, weights_stride, HI, D, BLOCK_H, BLOCK_D
    )
    dq = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    dweights = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    for start in tl.range(first, stop, BLOCK_S):
        keys = start + tl.arange(0, BLOCK_S)
        k_at = k_ptr + (keys % S).to(tl.int64)[:, None] * k_stride + channels[None, :]
        k = tl.load(k_at, mask=(channels < D)[None, :], other=0.0)
        dots = dot(k, tl.trans(q), tl.zeros((BLOCK_S, BLOCK_H), tl.float32), WIDEN)
        dscores = tl.load(dscores_ptr + token * S + keys, mask=keys < S, other=0.0)
        dweights += dscores[:, None] * tl.maximum(dots, 0.0)
        ddots = tl.where(dots > 0, (dscores * LIFT)[:, None] * weights[None, :], 0.0).to(q.dtype)
        dq = dot(tl.trans(ddots), k, dq, WIDEN)
    store_query_gradients(dq_ptr, dweights_ptr, dq, dweights, token, heads, channels, inside, grad_scale, HI, D, LIFT)


def kl(
    q: Tensor, k: Tensor, weights: Tensor, target: Tensor, grad_scale: float, **bounds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    starts, ends, key_positions = bounds_of(q, k, **bounds)
    q, k, weights, target = unit_stride(q), unit_stride(k), unit_stride(weights), target.contiguous()
    starts, ends = starts.contiguous(), ends.contiguous()
    positions = None if key_positions is None else key_positions.contiguous()
    num_queries, num_keys = q.shape[0], k.shape[0]
    loss = torch.zeros(num_queries, dtype=torch.float32, device=q.device)
    dq, dweights = torch.zeros_like(q, memory_format=torch.contiguous_format), weights.new_zeros(weights.shape)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    if not (q.numel() and num_keys):
        return loss, dq, dk, dweights
    scores = q.new_empty(num_queries, num_keys, dtype=torch.float32)
    scores_into(scores, q, k, weights, (starts, ends, positions))
    positions_or_placeholder = starts if positions is None else positions
    _rows_kernel[(num_queries,)](
        scores,
        target,
        starts,
        ends,
        positions_or_placeholder,
        loss,
        num_keys,
        HAS_POSITIONS=positions is not None,
        TILE=64 if is_interpreting() else 4096,
        num_warps=8,
    )
    _dense_dq_kernel[(num_queries,)](
        q,
        k,
        weights,
        scores,
        starts,
        ends,
        dq,
        dweights,
        *row_strides(q, k, weights),
        grad_scale,
        num_keys,
        HAS_POSITIONS=positions is not None,
        **gradient_plan("BLOCK_S", q, stages=2),
    )
    add_dk(q, k, weights, scores, (starts, ends, positions), dk, grad_scale)
    return loss, dq, dk, dweights
