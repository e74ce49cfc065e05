# mypy: allow-untyped-defs
"""Attention of decoded tokens: keys in splits of one size, each a program's, then the splits of a token together."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2
from ..linear_triton import dot
from .cuts_triton import load_cut

SPLIT = 128  # keys of one program: fixed, so that a token's sums do not depend on the batch
PROGRAMS = 1024  # of a call; a block table says how long a sequence may be, and few are that long


@triton.jit
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    top_ptr,
    total_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_block,
    k_stride_offset,
    k_stride_head,
    v_stride_block,
    v_stride_offset,
    v_stride_head,
    table_stride,
    scale,
    window,
    splits,
    B,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token, one key head and its G queries; every so many splits of the keys, each on its own."""
    follow(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    b, end = _sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B)
    first = tl.maximum(end - window, 0) if window > 0 else 0
    group = tl.arange(0, BLOCK_G)
    channels = tl.arange(0, BLOCK_D)
    q_at = q_ptr + token.to(tl.int64) * q_stride_t + (head * G + group)[:, None] * q_stride_h + channels[None, :]
    mask = (group < G)[:, None] & (channels < D)[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    table = tables_ptr + b.to(tl.int64) * table_stride
    for split in range(first // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for start in range(split * SPLIT, tl.minimum(end, (split + 1) * SPLIT), KEYS):
            keys = start + tl.arange(0, KEYS)
            k, v = load_cut(
                k_cache_ptr, v_cache_ptr, table, keys, end, head, k_stride_block, k_stride_offset, k_stride_head,
                v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE, D, BLOCK_D,
            )  # fmt: skip
            scores = dot(q, tl.trans(k), tl.zeros((BLOCK_G, KEYS), tl.float32), WIDEN) * scale
            visible = (keys < end) & (keys >= first)
            top, total, out = _online(scores, visible[None, :], v, top, total, out, WIDEN)
        row = (token.to(tl.int64) * splits + split) * (HK * G) + head * G + group
        tl.store(top_ptr + row, top, mask=group < G)
        tl.store(total_ptr + row, total, mask=group < G)
        tl.store(out_ptr + row[:, None] * D + channels[None, :], out, mask=mask)


@triton.jit
def _online(scores, visible, v, top, total, out, WIDEN: tl.constexpr):
    """One step of the running softmax, in powers of two; a block without visible keys changes no bit. None: all are."""
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weights, 1)
    out = dot(weights.to(v.dtype), v, out * keep[:, None], WIDEN)
    return new_top, total, out


@triton.jit
def _sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B: tl.constexpr):
    """The sequence of a token and how many keys it sees; none for a token past the last sequence."""
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(starts_ptr + 1 + index, mask=index < B, other=2147483647)
    b = tl.sum((ends <= token).to(tl.int32), 0)
    is_real = b < B
    length, stop = tl.load(lengths_ptr + b, mask=is_real, other=0), tl.load(starts_ptr + b + 1, mask=is_real, other=0)
    return b, tl.where(is_real, length - (stop - 1 - token), 0)


@triton.jit
def _combine_kernel(
    out_ptr,
    top_ptr,
    total_ptr,
    starts_ptr,
    lengths_ptr,
    y_ptr,
    window,
    splits,
    B,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The splits of one token and head, so many at a time, in order."""
    follow(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    _, end = _sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B)
    first = tl.maximum(end - window, 0) if window > 0 else 0
    channels = tl.arange(0, BLOCK_D)
    token = token.to(tl.int64)
    top = -float("inf")
    total = 0.0
    out = tl.zeros((BLOCK_D,), tl.float32)
    begin, stop = first // SPLIT, tl.cdiv(end, SPLIT)
    for start in range(begin // TOGETHER * TOGETHER, stop, TOGETHER):  # from multiples: the batch changes no sum
        split = start + tl.arange(0, TOGETHER)
        is_real = (split >= begin) & (split < stop)
        row = (token * splits + split) * HQ + head
        tops = tl.load(top_ptr + row, mask=is_real, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops, 0))
        keep, scaled = tl.exp2(top - new_top), tl.exp2(tops - new_top)
        total = total * keep + tl.sum(tl.load(total_ptr + row, mask=is_real, other=0.0) * scaled, 0)
        mask = is_real[:, None] & (channels < D)[None, :]
        parts = tl.load(out_ptr + row[:, None] * D + channels[None, :], mask=mask, other=0.0)
        out = out * keep + tl.sum(parts * scaled[:, None], 0)
        top = new_top
    y = tl.where(total > 0, out / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(y_ptr + (token * HQ + head) * D + channels, y.to(y_ptr.dtype.element_ty), mask=channels < D)


def decode(tensors: list[Tensor], strides: tuple[int, ...], scale: float, window: int) -> Tensor:
    q, k_cache, _, tables, starts, lengths = tensors
    tokens, heads, dim = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not y.numel():
        return y
    block_size, kv_heads = k_cache.shape[1:3]
    splits = max(1, ceil_div(tables.shape[1] * block_size, SPLIT))
    out = torch.empty(tokens, splits, heads, dim, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(tokens, splits, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    count = lengths.shape[0]
    sizes = {"D": dim, "BLOCK_D": max(16, power_of_2(dim)), "BLOCK_B": power_of_2(count), "SPLIT": SPLIT} | overlap(q)
    together = min(splits, max(1, PROGRAMS // (tokens * kv_heads)))
    _decode_kernel[(tokens, kv_heads, together)](
        *tensors,
        out,
        top,
        total,
        *strides,
        scale,
        window,
        splits,
        count,
        HK=kv_heads,
        G=heads // kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(16, power_of_2(heads // kv_heads)),
        KEYS=SPLIT,
        WIDEN=is_interpreting(),
        num_warps=4,
        num_stages=2,
        **sizes,
    )
    _combine_kernel[(tokens, heads)](
        out, top, total, starts, lengths, y, window, splits, count, HQ=heads, TOGETHER=8, num_warps=1, **sizes
    )
    return y
