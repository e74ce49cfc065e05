# mypy: allow-untyped-defs
"""Scores of the indexer over a paged cache of keys; the selection is done by `indexer/top_k_triton.py`.

No value is read back to the host: kernels read the lengths of sequences on the device, and the grid covers as many keys
as the block tables can hold. Only the scores of one chunk of tokens are in memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2
from .._sums_triton import halves
from ..attention.cuts_triton import settled
from ..indexer import top_k_triton
from ..indexer.bounds import chunks
from ..linear_triton import dot, unit_stride
from .codes_triton import byte_views, codes_for, hadamard_rows, scale_for

PROGRAMS = 264  # two per multiprocessor of an H200: with fewer programs the blocks of keys are made smaller


@triton.jit
def _round_kernel(
    q_ptr,
    weights_ptr,
    codes_ptr,
    factors_ptr,
    q_stride_t,
    q_stride_h,
    weights_stride,
    count,
    HI: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `round_queries`: transform queries to codes in q's dtype, and multiply their scales into the weights."""
    begin(OVERLAP)
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_real = rows < count
    token, head = rows // HI, rows % HI
    channels = tl.arange(0, D)[None, :]
    at = q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + channels
    x = hadamard_rows(tl.load(at, mask=is_real[:, None], other=0.0).to(tl.float32), ROWS, D)
    scale = scale_for(tl.max(tl.abs(x), 1))
    codes = codes_for(x, tl.broadcast_to(scale[:, None], x.shape)).to(tl.float8e4nv).to(tl.float32)
    tl.store(codes_ptr + rows[:, None] * D + channels, codes.to(codes_ptr.dtype.element_ty), mask=is_real[:, None])
    weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_real, other=0.0).to(tl.float32)
    tl.store(factors_ptr + rows, weight * scale, mask=is_real)


@triton.jit
def _find_share(group, starts_ptr, first, last, B, BLOCK_B: tl.constexpr, GROUP: tl.constexpr):
    """Return the sequence, the first token and the end of the group-th share of up to GROUP tokens of one sequence.

    Only tokens from `first` on and before `last` are counted. Sequence B means that there is no such share.
    """
    index = tl.arange(0, BLOCK_B)
    lows = tl.maximum(tl.load(starts_ptr + index, mask=index < B, other=0), first)
    highs = tl.minimum(tl.load(starts_ptr + 1 + index, mask=index < B, other=0), last)
    shares = tl.where(index < B, (tl.maximum(highs - lows, 0) + GROUP - 1) // GROUP, 0)
    b = tl.minimum(tl.sum((tl.cumsum(shares, 0) <= group).to(tl.int32), 0), B)
    before = tl.sum(tl.where(index < b, shares, 0), 0)
    low = tl.sum(tl.where(index == b, lows, 0), 0) + (group - before) * GROUP
    return b, low, tl.minimum(low + GROUP, tl.sum(tl.where(index == b, highs, 0), 0))


@triton.jit
def _load_keys(
    cache_ptr, scales_ptr, table_ptr, keys, end, stride_block, stride_offset, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Load keys [keys, BLOCK_D], and the scales of an 8-bit cache (otherwise ones)."""
    is_real = keys < end
    channels = tl.arange(0, BLOCK_D)[None, :]
    mask = is_real[:, None] & (channels < D)
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64) * stride_block
    offset = keys % BLOCK_SIZE
    if scales_ptr is None:
        k = tl.load(cache_ptr + (block + offset * stride_offset)[:, None] + channels, mask=mask, other=0.0)
        scale = tl.full(keys.shape, 1.0, tl.float32)
    else:
        codes = tl.load(cache_ptr + (block + offset * D)[:, None] + channels, mask=mask, other=0.0)
        k = settled(codes.to(tl.float32).to(DTYPE), WIDEN)
        scale = tl.load(scales_ptr + (block + BLOCK_SIZE * D) // 4 + offset, mask=is_real, other=0.0)
    return k, scale


@triton.jit
def _paged_scores_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    scales_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    scores_ptr,
    ends_ptr,
    q_stride_t,
    q_stride_h,
    weights_stride,
    stride_block,
    stride_offset,
    table_stride,
    first,
    last,
    S,
    B,
    HI: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Score a block of a sequence's keys, which stays in registers, for up to GROUP of its tokens, TOKENS at a time.

    Keys are the rows of the matmul and heads its columns. Heads are added by halves, so that a score's bits depend on
    its query and key alone. scores: [last - first, S]; scores of invisible keys may stay unwritten. ends: [T], how many
    keys each token sees, written by the program of the first block.
    """
    begin(OVERLAP)
    b, low, high = _find_share(tl.program_id(1), starts_ptr, first, last, B, BLOCK_B, GROUP)
    follow(OVERLAP)
    if b < B:
        offset_to_end = tl.load(lengths_ptr + b) - tl.load(starts_ptr + b + 1)  # a token's end is this + its index + 1
        keys = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
        end = offset_to_end + high
        if tl.program_id(0) == 0:
            tokens = low + tl.arange(0, GROUP)
            tl.store(ends_ptr + tokens, offset_to_end + tokens + 1, mask=tokens < high)
        if tl.program_id(0) * BLOCK_S < end:
            table = tables_ptr + b.to(tl.int64) * table_stride
            k, k_scale = _load_keys(
                cache_ptr, scales_ptr, table, keys, end, stride_block, stride_offset, D, BLOCK_D, BLOCK_SIZE,
                q_ptr.dtype.element_ty, WIDEN,
            )  # fmt: skip
            rows, channels = tl.arange(0, TOKENS * BLOCK_H), tl.arange(0, BLOCK_D)
            heads = rows % BLOCK_H
            for start in tl.range(low, high, TOKENS):
                token = start + rows // BLOCK_H
                is_real = (token < high) & (heads < HI)
                q_at = q_ptr + (token.to(tl.int64) * q_stride_t + heads * q_stride_h)[:, None] + channels[None, :]
                q = tl.load(q_at, mask=is_real[:, None] & (channels < D)[None, :], other=0.0)
                weights = tl.load(weights_ptr + token.to(tl.int64) * weights_stride + heads, mask=is_real, other=0.0)
                dots = dot(k, tl.trans(q), tl.zeros((BLOCK_S, TOKENS * BLOCK_H), tl.float32), WIDEN)
                weighted = tl.maximum(dots, 0.0) * weights.to(tl.float32)[None, :]
                by_head = tl.reshape(weighted, (BLOCK_S * TOKENS, BLOCK_H))
                scores = tl.reshape(halves(by_head, BLOCK_S * TOKENS, BLOCK_H, 1), (BLOCK_S, TOKENS)) * k_scale[:, None]
                tokens = start + tl.arange(0, TOKENS)
                at = scores_ptr + (tokens - first).to(tl.int64)[None, :] * S + keys[:, None]
                tl.store(at, scores, mask=(keys < end)[:, None] & (tokens < high)[None, :])


def forward(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    topk: int,
) -> Tensor:
    num_tokens, width = q.shape[0], block_tables.shape[1] * cache.shape[1]
    indices = q.new_empty(num_tokens, topk, dtype=torch.int32)
    values = q.new_empty(num_tokens, topk, dtype=torch.float32)
    # Zero, because no program writes the ends of tokens after the last sequence, which see nothing.
    starts, ends = torch.zeros(2, num_tokens, dtype=torch.int32, device=q.device)
    q, weights, cache, tables = (unit_stride(x) for x in (q, weights, cache, block_tables))
    lengths = query_starts.contiguous(), context_lens.contiguous()
    scales = None
    if cache.dtype == torch.uint8:
        q, weights = _round(q, weights)
        cache, scales = byte_views(cache)[:2]
    rows = next(chunks(num_tokens, width), slice(0, 0))
    scores = q.new_empty(rows.stop, width, dtype=torch.float32)
    for rows in chunks(num_tokens, width):
        part = scores[: rows.stop - rows.start]
        _score(q, weights, (cache, scales), tables, lengths, (rows, part, ends))
        top_k_triton.select(part, starts[rows], ends[rows], None, indices[rows], values[rows])
    return indices


def _round(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    codes = q.new_empty(q.shape)
    factors = q.new_empty(tokens, heads, dtype=torch.float32)
    size = 16 if is_interpreting() else 8
    if codes.numel():
        _round_kernel[(ceil_div(tokens * heads, size),)](
            q,
            weights,
            codes,
            factors,
            *q.stride()[:2],
            weights.stride(0),
            tokens * heads,
            HI=heads,
            D=dim,
            ROWS=size,
            num_warps=2,
            enable_fp_fusion=False,
            **overlap(q),
        )
    return codes, factors


def _score(
    q: Tensor,
    weights: Tensor,
    pages: tuple[Tensor, Tensor | None],
    tables: Tensor,
    lengths: tuple[Tensor, Tensor],
    output: tuple[slice, Tensor, Tensor],
) -> None:
    """Compute the scores of some tokens, and how many keys each of them sees."""
    rows, scores, ends = output
    cache, width, count = pages[0], scores.shape[1], lengths[1].shape[0]
    if not scores.numel():
        return
    plan = _plan(q, width, rows.stop - rows.start, count)
    groups = ceil_div(rows.stop - rows.start, plan["GROUP"]) + count  # an upper bound of the number of shares
    _paged_scores_kernel[(ceil_div(width, plan["BLOCK_S"]), groups)](
        q,
        weights,
        *pages,
        tables,
        *lengths,
        scores,
        ends,
        *q.stride()[:2],
        weights.stride(0),
        *cache.stride()[:2],
        tables.stride(0),
        rows.start,
        rows.stop,
        width,
        count,
        HI=q.shape[1],
        D=q.shape[2],
        BLOCK_SIZE=cache.shape[1],
        BLOCK_B=power_of_2(count),
        WIDEN=is_interpreting(),
        enable_fp_fusion=False,
        **plan,
        **overlap(q),
    )


def _plan(q: Tensor, width: int, num_tokens: int, count: int) -> dict[str, Any]:
    """Return block sizes, which affect speed alone: small blocks where large ones would leave multiprocessors idle."""
    block_h, block_d = max(8, power_of_2(q.shape[1])), max(16, power_of_2(q.shape[2]))
    if is_interpreting():
        tokens = max(2, 16 // block_h)
        return {"BLOCK_S": 32, "BLOCK_H": block_h, "BLOCK_D": block_d, "TOKENS": tokens, "GROUP": 4 * tokens}
    tokens = max(1, 64 // block_h)
    sizes = {"BLOCK_H": block_h, "BLOCK_D": block_d, "TOKENS": tokens, "GROUP": max(32, tokens)}
    programs = ceil_div(width, 256) * max(min(count, num_tokens), num_tokens // sizes["GROUP"])
    if q.element_size() == 4 or block_d > 128 or block_h > 64 or programs < PROGRAMS:
        return {"BLOCK_S": 64, **sizes, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_S": 256, **sizes, "num_warps": 8, "num_stages": 3}
