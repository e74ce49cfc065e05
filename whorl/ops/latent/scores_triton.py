# mypy: allow-untyped-defs
"""Scores of the indexer's keys in a paged cache, for prompts and for decoding.

A program of a prompt holds a block of keys and loops over the tokens that see it. A decoding token is the only one that
sees its keys: its program holds the query and loops over blocks of keys, which are loaded ahead. The bits are equal.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._codes_triton import opaque
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2
from .._sums_triton import halves
from ..attention.decode_triton import block_of_sequences
from ..linear_triton import dot

PROGRAMS = 264  # two per multiprocessor of an H200: with fewer programs the blocks of keys are made smaller
DRAFTED = 4  # tokens per sequence up to which a token's keys are few tokens' alone: drafts and the last token
LONGEST = 4096  # keys of one program that decodes


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
        k = opaque(codes.to(DTYPE), WIDEN)
        scale = tl.load(scales_ptr + (block + BLOCK_SIZE * D) // 4 + offset, mask=is_real, other=0.0)
    return k, scale


@triton.jit
def _load_queries(
    q_ptr, weights_ptr, start, high, q_stride_t, q_stride_h, weights_stride, HI: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Load the queries of TOKENS tokens from `start` on, [TOKENS * BLOCK_H, BLOCK_D], and their heads' weights."""
    rows, channels = tl.arange(0, TOKENS * BLOCK_H), tl.arange(0, BLOCK_D)
    heads = rows % BLOCK_H
    token = start + rows // BLOCK_H
    is_real = (token < high) & (heads < HI)
    q_at = q_ptr + (token.to(tl.int64) * q_stride_t + heads * q_stride_h)[:, None] + channels[None, :]
    q = tl.load(q_at, mask=is_real[:, None] & (channels < D)[None, :], other=0.0)
    weights = tl.load(weights_ptr + token.to(tl.int64) * weights_stride + heads, mask=is_real, other=0.0)
    return q, weights.to(tl.float32)


@triton.jit
def _score_block(
    k, k_scale, q, weights, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr, WIDEN: tl.constexpr
):
    """Return the scores [BLOCK_S, TOKENS] of a block of keys.

    Keys are the rows of the matmul and heads its columns. Heads are added by halves, so that a score's bits depend on
    its query and key alone.
    """
    dots = dot(k, tl.trans(q), tl.zeros((BLOCK_S, TOKENS * BLOCK_H), tl.float32), WIDEN)
    weighted = tl.maximum(dots, 0.0) * weights[None, :]
    by_head = tl.reshape(weighted, (BLOCK_S * TOKENS, BLOCK_H))
    return tl.reshape(halves(by_head, BLOCK_S * TOKENS, BLOCK_H, 1), (BLOCK_S, TOKENS)) * k_scale[:, None]


@triton.jit
def _store_scores(scores_ptr, scores, keys, end, start, high, first, S, TOKENS: tl.constexpr):
    """Store scores [keys, TOKENS] of the tokens from `start` on."""
    tokens = start + tl.arange(0, TOKENS)
    at = scores_ptr + (tokens - first).to(tl.int64)[None, :] * S + keys[:, None]
    tl.store(at, scores, mask=(keys < end)[:, None] & (tokens < high)[None, :])


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
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    DECODES: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Score SPAN keys of a sequence for up to GROUP of its tokens, BLOCK_S keys and TOKENS tokens at a time.

    DECODES: the tokens stay in registers, and the keys pass. Otherwise the keys do, and the tokens pass.
    scores: [last - first, S]; scores of invisible keys may stay unwritten. ends: [T], how many keys each token sees,
    written by the program of the first keys.
    """
    begin(OVERLAP)
    b, low, high = _find_share(tl.program_id(1), starts_ptr, first, last, B, BLOCK_B, GROUP)
    follow(OVERLAP)
    if b < B:
        offset_to_end = tl.load(lengths_ptr + b) - tl.load(starts_ptr + b + 1)  # a token's end is this + its index + 1
        end = offset_to_end + high
        begins = tl.program_id(0) * SPAN
        if begins == 0:
            tokens = low + tl.arange(0, GROUP)
            tl.store(ends_ptr + tokens, offset_to_end + tokens + 1, mask=tokens < high)
        if begins < end:
            table = tables_ptr + b.to(tl.int64) * table_stride
            if DECODES:
                q, weights = _load_queries(
                    q_ptr, weights_ptr, low, high, q_stride_t, q_stride_h, weights_stride, HI, D, BLOCK_H, BLOCK_D,
                    TOKENS,
                )  # fmt: skip
                for block in tl.range(begins, tl.minimum(begins + SPAN, end), BLOCK_S, num_stages=STAGES):
                    keys = block + tl.arange(0, BLOCK_S)
                    k, k_scale = _load_keys(
                        cache_ptr, scales_ptr, table, keys, end, stride_block, stride_offset, D, BLOCK_D, BLOCK_SIZE,
                        q_ptr.dtype.element_ty, WIDEN,
                    )  # fmt: skip
                    scores = _score_block(k, k_scale, q, weights, BLOCK_S, BLOCK_H, TOKENS, WIDEN)
                    _store_scores(scores_ptr, scores, keys, end, low, high, first, S, TOKENS)
            else:
                keys = begins + tl.arange(0, BLOCK_S)
                k, k_scale = _load_keys(
                    cache_ptr, scales_ptr, table, keys, end, stride_block, stride_offset, D, BLOCK_D, BLOCK_SIZE,
                    q_ptr.dtype.element_ty, WIDEN,
                )  # fmt: skip
                for start in tl.range(low, high, TOKENS):
                    q, weights = _load_queries(
                        q_ptr, weights_ptr, start, high, q_stride_t, q_stride_h, weights_stride, HI, D, BLOCK_H,
                        BLOCK_D, TOKENS,
                    )  # fmt: skip
                    scores = _score_block(k, k_scale, q, weights, BLOCK_S, BLOCK_H, TOKENS, WIDEN)
                    _store_scores(scores_ptr, scores, keys, end, start, high, first, S, TOKENS)


def write_scores(
    q: Tensor,
    weights: Tensor,
    pages: tuple[Tensor, Tensor | None],
    tables: Tensor,
    lengths: tuple[Tensor, Tensor],
    output: tuple[slice, Tensor, Tensor],
) -> None:
    """Compute the scores of some tokens, and how many keys each of them sees.

    pages: the cache and its scales; lengths: query_starts and context_lens; output: the tokens, scores and ends.
    """
    rows, scores, ends = output
    cache, width, count = pages[0], scores.shape[1], lengths[1].shape[0]
    if not scores.numel():
        return
    num_tokens = rows.stop - rows.start
    decodes = num_tokens <= DRAFTED * count
    plan = _decode_plan(q, width, num_tokens) if decodes else _plan(q, width, num_tokens, count)
    plan = {"SPAN": plan["BLOCK_S"], "GROUP": plan["TOKENS"], "STAGES": 1, "DECODES": decodes} | plan
    groups = ceil_div(num_tokens, plan["GROUP"]) + count  # an upper bound of the number of shares
    _paged_scores_kernel[(ceil_div(width, plan["SPAN"]), groups)](
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
        BLOCK_B=block_of_sequences(count),
        WIDEN=is_interpreting(),
        enable_fp_fusion=False,
        **plan,
        **overlap(q),
    )


def _blocks(q: Tensor) -> dict[str, int]:
    return {"BLOCK_H": max(8, power_of_2(q.shape[1])), "BLOCK_D": max(16, power_of_2(q.shape[2]))}


def _is_large(q: Tensor, sizes: dict[str, int]) -> bool:
    return q.element_size() == 4 or sizes["BLOCK_D"] > 128 or sizes["BLOCK_H"] > 64


def _plan(q: Tensor, width: int, num_tokens: int, count: int) -> dict[str, Any]:
    """Return block sizes, which affect speed alone: small blocks where large ones would leave multiprocessors idle."""
    sizes = _blocks(q)
    if is_interpreting():
        tokens = max(2, 16 // sizes["BLOCK_H"])
        return sizes | {"BLOCK_S": 32, "TOKENS": tokens, "GROUP": 4 * tokens}
    tokens = max(1, 64 // sizes["BLOCK_H"])
    sizes |= {"TOKENS": tokens, "GROUP": max(32, tokens)}
    programs = ceil_div(width, 256) * max(min(count, num_tokens), num_tokens // sizes["GROUP"])
    if _is_large(q, sizes) or programs < PROGRAMS:
        return sizes | {"BLOCK_S": 64, "num_warps": 4, "num_stages": 2}
    return sizes | {"BLOCK_S": 256, "num_warps": 8, "num_stages": 3}


def _decode_plan(q: Tensor, width: int, num_tokens: int) -> dict[str, Any]:
    """Return block sizes for decoding: a program takes more keys the more programs there are."""
    sizes = _blocks(q)
    if is_interpreting():
        return sizes | {"BLOCK_S": 32, "TOKENS": max(2, 16 // sizes["BLOCK_H"]), "SPAN": 64, "STAGES": 1}
    sizes["TOKENS"] = max(1, 64 // sizes["BLOCK_H"])
    block = 64 if _is_large(q, sizes) else 128
    span = power_of_2(ceil_div(width * ceil_div(num_tokens, sizes["TOKENS"]), 2 * PROGRAMS))
    return sizes | {"BLOCK_S": block, "SPAN": min(max(span, block), LONGEST), "STAGES": 3, "num_warps": 4}
