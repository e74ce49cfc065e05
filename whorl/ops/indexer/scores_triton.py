# mypy: allow-untyped-defs
"""Scores of the lightning indexer in Triton, and the loop over chunks of queries that bounds their memory."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from . import top_k_triton
from .bounds import chunks, full_bounds


@triton.jit
def key_block(positions_ptr, first, S, BLOCK_S: tl.constexpr, HAS_POSITIONS: tl.constexpr):
    """Return the keys of a block, the mask of existing ones, their positions, and the lowest and highest position."""
    keys = first + tl.arange(0, BLOCK_S)
    exists = keys < S
    if HAS_POSITIONS:
        positions = tl.load(positions_ptr + keys, mask=exists, other=0)
        lowest = tl.min(tl.where(exists, positions, 2147483647), 0)
        highest = tl.max(tl.where(exists, positions, -2147483648), 0)
    else:
        positions = keys
        lowest, highest = first, tl.minimum(first + BLOCK_S, S) - 1
    return keys, exists, positions, lowest, highest


@triton.jit
def weighted_sum(dots, weights, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Reduce the products [keys, TOKENS * BLOCK_H] to scores [keys, TOKENS]."""
    weighted = tl.maximum(dots, 0.0) * weights[None, :]
    return tl.sum(tl.reshape(weighted, (dots.shape[0], TOKENS, BLOCK_H)), 2)


@triton.jit
def _scores_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    k_scale_ptr,
    starts_ptr,
    ends_ptr,
    positions_ptr,
    scores_ptr,
    q_stride_t,
    q_stride_h,
    k_stride,
    weights_stride,
    T,
    S,
    HI: tl.constexpr,
    D: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Score a block of keys, which stays in registers, for GROUP queries, TOKENS at a time.

    Keys are the rows of the matmul and heads its columns, so that the sum over heads stays within a thread.
    """
    first_key, first_token = tl.program_id(0) * BLOCK_S, tl.program_id(1) * GROUP
    keys, exists, positions, lowest, highest = key_block(positions_ptr, first_key, S, BLOCK_S, HAS_POSITIONS)
    group = first_token + tl.arange(0, GROUP)
    last_end = tl.max(tl.load(ends_ptr + group, mask=group < T, other=-2147483648), 0)
    first_start = tl.min(tl.load(starts_ptr + group, mask=group < T, other=2147483647), 0)
    if (lowest < last_end) & (highest >= first_start):
        channels = tl.arange(0, BLOCK_D)
        k_at = k_ptr + keys.to(tl.int64)[:, None] * k_stride + channels[None, :]
        k = tl.load(k_at, mask=exists[:, None] & (channels < D)[None, :], other=0.0)
        if HAS_SCALE:
            k_scale = tl.load(k_scale_ptr + keys, mask=exists, other=0.0).to(tl.float32)
        rows = tl.arange(0, TOKENS * BLOCK_H)
        heads = rows % BLOCK_H
        for start in tl.range(first_token, tl.minimum(first_token + GROUP, T), TOKENS):
            token = start + rows // BLOCK_H
            real = (token < T) & (heads < HI)
            q_at = q_ptr + (token.to(tl.int64) * q_stride_t + heads * q_stride_h)[:, None] + channels[None, :]
            q = tl.load(q_at, mask=real[:, None] & (channels < D)[None, :], other=0.0)
            weights = tl.load(weights_ptr + token.to(tl.int64) * weights_stride + heads, mask=real, other=0.0)
            dots = dot(k, tl.trans(q), tl.zeros((BLOCK_S, TOKENS * BLOCK_H), tl.float32), WIDEN)
            scores = weighted_sum(dots, weights.to(tl.float32), TOKENS, BLOCK_H)
            if HAS_SCALE:
                scores *= k_scale[:, None]
            tokens = start + tl.arange(0, TOKENS)
            if FILL:
                above = positions[:, None] >= tl.load(starts_ptr + tokens, mask=tokens < T, other=0)[None, :]
                below = positions[:, None] < tl.load(ends_ptr + tokens, mask=tokens < T, other=0)[None, :]
                scores = tl.where(above & below, scores, 0.0)
            at = scores_ptr + tokens.to(tl.int64)[None, :] * S + keys[:, None]
            tl.store(at, scores, mask=exists[:, None] & (tokens < T)[None, :])
    elif FILL:
        at = scores_ptr + first_token.to(tl.int64) * S + keys
        for _ in range(first_token, tl.minimum(first_token + GROUP, T)):
            tl.store(at, tl.zeros((BLOCK_S,), tl.float32), mask=exists)
            at += S


@functools.lru_cache(maxsize=64)
def scores_plan(heads: int, dim: int, element_size: int) -> dict[str, int]:
    """Return block sizes with which two programs fit a multiprocessor, so that one sums while the other multiplies."""
    block_h, block_d = max(8, power_of_2(heads)), max(32 if element_size == 1 else 16, power_of_2(dim))
    if is_interpreting():
        tokens = max(2, 16 // block_h)
        return {"BLOCK_S": 32, "BLOCK_H": block_h, "BLOCK_D": block_d, "TOKENS": tokens, "GROUP": 4 * tokens}
    tokens = max(1, 64 // block_h)
    sizes = {"BLOCK_H": block_h, "BLOCK_D": block_d, "TOKENS": tokens, "GROUP": max(32, tokens)}
    if element_size == 4 or block_d > 128 or block_h > 64:
        return {"BLOCK_S": 64, **sizes, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_S": 256, **sizes, "num_warps": 8, "num_stages": 3}


def row_strides(q: Tensor, k: Tensor, weights: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of a query and of its heads, of a key, and of a query's weights."""
    return q.stride(0), q.stride(1), k.stride(0), weights.stride(0)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, **bounds: Tensor | None) -> Tensor:
    return scores_into(None, q, k, weights, bounds_of(q, k, **bounds), k_scale)


def bounds_of(
    q: Tensor, k: Tensor, *, starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the bounds as the kernels take them: both of positions, and the positions."""
    return *full_bounds(q.shape[0], k.shape[0], starts, ends, q.device), key_positions


def scores_into(
    out: Tensor | None,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    bounds: tuple[Tensor, Tensor, Tensor | None],
    k_scale: Tensor | None = None,
) -> Tensor:
    """Compute `index_scores`, into `out` if given: [T, S] contiguous, where scores of invisible keys are not written.

    A caller that passes `out` must apply the bounds itself.
    """
    starts, ends, key_positions = bounds
    q, k, weights = unit_stride(q), unit_stride(k), unit_stride(weights)
    scores = q.new_empty(q.shape[0], k.shape[0], dtype=torch.float32) if out is None else out
    if not scores.numel():
        return scores
    plan = scores_plan(q.shape[1], q.shape[2], q.element_size())
    grid = (ceil_div(k.shape[0], plan["BLOCK_S"]), ceil_div(q.shape[0], plan["GROUP"]))
    _scores_kernel[grid](
        q,
        k,
        weights,
        weights if k_scale is None else k_scale.contiguous(),
        starts.contiguous(),
        ends.contiguous(),
        ends if key_positions is None else key_positions.contiguous(),
        scores,
        *row_strides(q, k, weights),
        q.shape[0],
        k.shape[0],
        HI=q.shape[1],
        D=q.shape[2],
        HAS_POSITIONS=key_positions is not None,
        HAS_SCALE=k_scale is not None,
        FILL=out is None,
        WIDEN=is_interpreting(),
        **plan,
    )
    return scores


def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    k_scale: Tensor | None,
    with_scores: bool,
    **visible: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    num_queries, num_keys = q.shape[0], k.shape[0]
    indices = q.new_empty(num_queries, topk, dtype=torch.int32)
    values = q.new_empty(num_queries, topk, dtype=torch.float32)
    starts, ends, key_positions = bounds_of(q, k, **visible)
    scores = None
    for rows in chunks(num_queries, num_keys):
        # With the causal default the host knows which keys the last query sees, without synchronising with the device.
        num_visible = max(0, num_keys - num_queries + rows.stop) if visible["ends"] is None else num_keys
        scores = q.new_empty((rows.stop - rows.start) * num_keys, dtype=torch.float32) if scores is None else scores
        part = scores[: (rows.stop - rows.start) * num_visible].view(rows.stop - rows.start, num_visible)
        bounds = (starts[rows], ends[rows], key_positions)
        scores_into(
            part, q[rows], k[:num_visible], weights[rows], bounds, None if k_scale is None else k_scale[:num_visible]
        )
        top_k_triton.select(part, *bounds, indices[rows], values[rows])
    return indices, values if with_scores else None
