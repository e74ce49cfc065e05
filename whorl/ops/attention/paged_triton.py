# mypy: allow-untyped-defs
"""Kernels over a paged cache: writing it, attention of decoded tokens in key splits of one size, and of prompts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2
from ..linear_triton import dot, unit_stride

SPLIT = 128  # keys of one program in decoding: fixed, so that a token's sums do not depend on the batch
PROGRAMS = 1024  # of a decode call; a block table says how long a sequence may be, and few are that long
LOG2_E = 1.4426950408889634


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_stride_block,
    k_stride_offset,
    k_stride_head,
    v_stride_block,
    v_stride_offset,
    v_stride_head,
    BLOCK_SIZE: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = tl.arange(0, BLOCK_H)[:, None]
        channels = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < HK) & (channels < D)
        k = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + channels, mask=mask)
        v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + channels, mask=mask)
        k_at = k_cache_ptr + block * k_stride_block + offset * k_stride_offset + heads * k_stride_head
        v_at = v_cache_ptr + block * v_stride_block + offset * v_stride_offset + heads * v_stride_head
        tl.store(k_at + channels, k, mask=mask)
        tl.store(v_at + channels, v, mask=mask)


@triton.jit
def _load_keys(
    cache_ptr, table_ptr, keys, end, head, stride_block, stride_offset, stride_head, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[keys, BLOCK_D] of one head; zero past `end`."""
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    at = cache_ptr + block * stride_block + (keys % BLOCK_SIZE) * stride_offset + head * stride_head
    channels = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(at[:, None] + channels, mask=(keys < end)[:, None] & (channels < D), other=0.0)


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
            k = _load_keys(
                k_cache_ptr, table, keys, end, head, k_stride_block, k_stride_offset, k_stride_head, BLOCK_SIZE, D,
                BLOCK_D,
            )  # fmt: skip
            v = _load_keys(
                v_cache_ptr, table, keys, end, head, v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE, D,
                BLOCK_D,
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


@triton.jit
def _prompt_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    y_ptr,
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
    B,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of one sequence's queries, one head; key blocks start at multiples of KEYS."""
    tile, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, BLOCK_B)
    starts = tl.load(starts_ptr + index, mask=index < B, other=0)
    ends = tl.load(starts_ptr + 1 + index, mask=index < B, other=0)
    tiles = tl.cdiv(ends - starts, QUERIES)
    until = tl.cumsum(tiles, 0)
    b = tl.sum(((until <= tile) & (index < B)).to(tl.int32), 0)
    if b < B:
        query = (tile - tl.sum(tl.where(index < b, tiles, 0), 0)) * QUERIES + tl.arange(0, QUERIES)
        start, count = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1) - tl.load(starts_ptr + b)
        length = tl.load(lengths_ptr + b)
        position = length - count + query
        token = (start + query).to(tl.int64)
        channels = tl.arange(0, BLOCK_D)
        mask = (query < count)[:, None] & (channels < D)[None, :]
        q = tl.load(q_ptr + token[:, None] * q_stride_t + head * q_stride_h + channels[None, :], mask=mask, other=0.0)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        out = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        lowest = tl.min(position, 0)
        first = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS if window > 0 else 0
        table = tables_ptr + b.to(tl.int64) * table_stride
        # Blocks that every query sees whole need no mask; a mask that hides nothing changes no bit.
        middle = tl.maximum((lowest + 1) // KEYS * KEYS, first) if window == 0 else first
        for block in range(first, middle, KEYS):
            keys = block + tl.arange(0, KEYS)
            k = _load_keys(
                k_cache_ptr, table, keys, length, head // G, k_stride_block, k_stride_offset, k_stride_head,
                BLOCK_SIZE, D, BLOCK_D,
            )  # fmt: skip
            v = _load_keys(
                v_cache_ptr, table, keys, length, head // G, v_stride_block, v_stride_offset, v_stride_head,
                BLOCK_SIZE, D, BLOCK_D,
            )  # fmt: skip
            scores = dot(q, tl.trans(k), tl.zeros((QUERIES, KEYS), tl.float32), WIDEN) * scale
            top, total, out = _online(scores, None, v, top, total, out, WIDEN)
        for block in range(middle, tl.minimum(length, lowest + QUERIES), KEYS):
            keys = block + tl.arange(0, KEYS)
            k = _load_keys(
                k_cache_ptr, table, keys, length, head // G, k_stride_block, k_stride_offset, k_stride_head,
                BLOCK_SIZE, D, BLOCK_D,
            )  # fmt: skip
            v = _load_keys(
                v_cache_ptr, table, keys, length, head // G, v_stride_block, v_stride_offset, v_stride_head,
                BLOCK_SIZE, D, BLOCK_D,
            )  # fmt: skip
            scores = dot(q, tl.trans(k), tl.zeros((QUERIES, KEYS), tl.float32), WIDEN) * scale
            visible = keys[None, :] <= position[:, None]
            if window > 0:
                visible = visible & (keys[None, :] > position[:, None] - window)
            top, total, out = _online(scores, visible, v, top, total, out, WIDEN)
        y_at = y_ptr + (token[:, None] * HQ + head) * D + channels[None, :]
        tl.store(y_at, (out / total[:, None]).to(y_ptr.dtype.element_ty), mask=mask)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    if not k.numel():
        return
    k, v = unit_stride(k), unit_stride(v)
    heads, dim = k.shape[1:]
    _write_kv_kernel[(k.shape[0],)](
        k,
        v,
        k_cache,
        v_cache,
        slots.contiguous(),
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        HK=heads,
        D=dim,
        BLOCK_H=power_of_2(heads),
        BLOCK_D=power_of_2(dim),
        num_warps=max(1, min(8, power_of_2(heads) * power_of_2(dim) // 256)),
        **overlap(k),
    )


def attention(scale: float, window: int, rows: str, **given: Tensor) -> Tensor:
    tensors = [unit_stride(given[name]) for name in ("q", "k_cache", "v_cache", "block_tables")]
    tensors += [given["query_starts"].contiguous(), given["context_lens"].contiguous()]
    strides = (*tensors[0].stride()[:2], *tensors[1].stride()[:3], *tensors[2].stride()[:3], tensors[3].stride(0))
    attend = _prompt if rows == "prompt" else _decode
    return attend(tensors, strides, scale * LOG2_E, window)


def _decode(tensors: list[Tensor], strides: tuple[int, ...], scale: float, window: int) -> Tensor:
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


def _prompt(tensors: list[Tensor], strides: tuple[int, ...], scale: float, window: int) -> Tensor:
    q, k_cache, _, _, _, lengths = tensors
    tokens, heads, dim = q.shape
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # rows of no sequence stay zero
    if not y.numel():
        return y
    count = lengths.shape[0]
    queries = 16 if is_interpreting() else 128 if q.element_size() == 2 and dim <= 128 else 32
    _prompt_kernel[(ceil_div(tokens, queries) + count, heads)](
        *tensors,
        y,
        *strides,
        scale,
        window,
        count,
        HQ=heads,
        G=heads // k_cache.shape[2],
        D=dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_B=power_of_2(count),
        BLOCK_D=max(16, power_of_2(dim)),
        QUERIES=queries,
        KEYS=64 if q.element_size() == 2 else 32,
        WIDEN=is_interpreting(),
        num_warps=8 if queries == 128 else 4,
        num_stages=2,
    )
    return y
