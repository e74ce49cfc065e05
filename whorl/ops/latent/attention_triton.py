# mypy: allow-untyped-defs
"""Attention over latents in a paged cache: a program takes some heads of one token, and loops over cuts of its keys.

The arithmetic is that of `attention/cuts_triton.py`, with the first channels of the keys as values. With enough tokens
a program processes a token's list of keys from first to last and merges each cut into the result so far. With few
tokens several programs share the cuts of a list, and a second kernel merges their results in order: the bits are the
same. Value channels are processed in chunks, because the accumulators of a cut beside those of the result would not fit
the registers for 64 heads. No value is read back to the host.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._codes_triton import opaque
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2, unit_stride
from ..attention.cuts_triton import LOG2_E, add_rescaled, cut_of, exp_scores, rescale_factors, total_of
from ..attention.decode_triton import block_of_sequences, divided, sequence_of
from ..attention.fold_triton import fold_stored
from ..linear_triton import dot
from .codes import GROUP
from .codes_triton import GROUP_SIZE, byte_views

PROGRAMS = 132  # multiprocessors of an H200, each of which has room for one program
SCRATCH = 2**30  # largest scratch memory for results of cuts in bytes; beyond it one program takes all cuts of a list
CHANNELS = 128  # value channels per chunk, and per program of the merging kernel
MORE = 16  # cuts whose results are loaded at once when they are merged: those of 2048 keys


@triton.jit
def _words_bf16(words, scales):
    """Return the products of the four e4m3 codes of each word and its fp32 scale, rounded to bf16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, c0, c1, c2, c3;
        .reg .b32 a, b;
        .reg .f32 x0, x1, x2, x3;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        mov.b32 {c0, c1}, a;
        mov.b32 {c2, c3}, b;
        cvt.f32.f16 x0, c0;
        cvt.f32.f16 x1, c1;
        cvt.f32.f16 x2, c2;
        cvt.f32.f16 x3, c3;
        mul.rn.f32 x0, x0, $5;
        mul.rn.f32 x1, x1, $5;
        mul.rn.f32 x2, x2, $5;
        mul.rn.f32 x3, x3, $5;
        cvt.rn.bf16x2.f32 a, x1, x0;
        cvt.rn.bf16x2.f32 b, x3, x2;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }""",
        "=h,=h,=h,=h,r,f",
        [words, scales],
        dtype=(tl.bfloat16,) * 4,
        is_pure=False,  # as in `opaque`
        pack=1,
    )


@triton.jit
def _load_chunk(
    cache_ptr, scales_ptr, at, is_real, FIRST: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr
):  # fmt: skip
    """Load channels [keys, WIDTH] from FIRST on, of the first LATENT, and the scales of codes [keys].

    Zeros are loaded where there is no key. A cache of int32 holds four codes in a word: registers hold single codes in
    32 bits each. Without codes there are no scales; the channels are returned twice.
    """
    LENGTH: tl.constexpr = WIDTH // 4 if cache_ptr.dtype.element_ty == tl.int32 else WIDTH
    offset = FIRST * LENGTH // WIDTH + tl.arange(0, LENGTH)[None, :]
    mask = is_real[:, None] if FIRST + WIDTH <= LATENT else is_real[:, None] & (offset < LATENT * LENGTH // WIDTH)
    start = at // (WIDTH // LENGTH)
    numbers = tl.load(cache_ptr + start[:, None] + offset, mask=mask, other=0.0)
    if scales_ptr is None:
        return numbers, numbers
    else:  # WIDTH divides a group
        return numbers, tl.load(scales_ptr + at // 4 + (LATENT // 4 + FIRST // GROUP_SIZE), mask=is_real, other=0.0)


@triton.jit
def _to_values(numbers, scale, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """Return what `_load_chunk` loaded in the dtype of the queries: codes are multiplied by their scales."""
    if numbers.dtype == DTYPE:
        return numbers
    elif numbers.dtype == tl.int32:
        a, b, c, d = _words_bf16(numbers, tl.broadcast_to(scale[:, None], numbers.shape))
        values = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.reshape(values, (numbers.shape[0], 4 * numbers.shape[1]))
    else:
        wide = numbers.to(tl.float32)
        return opaque((wide * tl.broadcast_to(scale[:, None], wide.shape)).to(DTYPE), WIDEN)


@triton.jit
def _load_rotary(
    cache_ptr, rotary_ptr, at, is_real, LATENT: tl.constexpr, ROTARY: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load the rotary channels, which follow the latent: [keys, BLOCK_R]."""
    channels = tl.arange(0, BLOCK_R)[None, :]
    mask = is_real[:, None] & (channels < ROTARY)
    if rotary_ptr is None:
        values = tl.load(cache_ptr + at[:, None] + LATENT + channels, mask=mask, other=0.0)
    else:
        values = tl.load(rotary_ptr + (at // 2 + (LATENT + 4 * GROUPS) // 2)[:, None] + channels, mask=mask, other=0.0)
    return values.to(DTYPE)


@triton.jit
def _list_keys(indices_ptr, entry, end, K):
    """Return the keys at these entries of a token's list, and the mask of those that exist."""
    if indices_ptr is None:
        keys, is_real = entry, entry < end
    else:
        keys = tl.load(indices_ptr + entry, mask=entry < K, other=-1)
        keys, is_real = tl.maximum(keys, 0), keys >= 0
    return keys, is_real


@triton.jit
def _find_cut(
    i, table_ptr, indices_ptr, end, K, stride_block, stride_offset, BLOCK_SIZE: tl.constexpr, CUT: tl.constexpr
):
    """Return the offsets in the cache of the keys of cut i of a token's list, and the mask of those that exist."""
    keys, is_real = _list_keys(indices_ptr, i * CUT + tl.arange(0, CUT), end, K)
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64)
    return block * stride_block + (keys % BLOCK_SIZE) * stride_offset, is_real


@triton.jit
def _dot_in_loop(a, b, total, once, WIDEN: tl.constexpr):
    """Compute `dot` in a loop that runs once.

    The compiler gives consecutive matmuls all warps along their rows, so that 64 rows would be computed twice.
    """
    for _ in tl.range(0, once, num_stages=1):
        total = dot(a, b, total, WIDEN)
    return total


@triton.jit
def _num_cuts(b, end, lengths_ptr, indices_ptr, K, B, CUT: tl.constexpr):
    """Return the number of cuts of a token's list; 0 for a token after the last sequence."""
    most = end
    if indices_ptr is not None:
        most = tl.minimum(tl.load(lengths_ptr + b, mask=b < B, other=0), K)
    return tl.cdiv(most, CUT)


@triton.jit
def _latent_kernel(
    q_ptr,
    cache_ptr,
    scales_ptr,
    rotary_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    indices_ptr,
    out_ptr,
    top_ptr,
    total_ptr,
    y_ptr,
    q_stride_t,
    q_stride_h,
    stride_block,
    stride_offset,
    table_stride,
    indices_stride,
    scale,
    cuts,
    K,
    B,
    HQ: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CUT: tl.constexpr,
    WALKS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK_H heads of one token: all cuts of its list in order (WALKS), or every n-th cut separately.

    indices_ptr: None if a token sees every key up to its own; scales_ptr and rotary_ptr: given for 8-bit caches.
    """
    begin(OVERLAP)
    b, end = sequence_of(tl.program_id(1), starts_ptr, lengths_ptr, B, BLOCK_B)
    stop = _num_cuts(b, end, lengths_ptr, indices_ptr, K, B, CUT)
    table = tables_ptr + b.to(tl.int64) * table_stride
    follow(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    if indices_ptr is not None:
        indices_ptr += token * indices_stride
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (heads < HQ)[:, None]
    row = token * HQ + heads
    q_at = q_ptr + token * q_stride_t + heads[:, None] * q_stride_h
    q, out = (), ()
    for c in tl.static_range(CHUNKS):
        channels = c * WIDTH + tl.arange(0, WIDTH)[None, :]
        q = q + (tl.load(q_at + channels, mask=is_head & (channels < LATENT), other=0.0),)  # type: ignore[assignment]
        out = out + (tl.zeros((BLOCK_H, WIDTH), tl.float32),)  # type: ignore[assignment]
    if ROTARY > 0:
        behind = tl.arange(0, BLOCK_R)[None, :]
        q_rotary = tl.load(q_at + LATENT + behind, mask=is_head & (behind < ROTARY), other=0.0)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    # The loads of a chunk are issued before the previous one is multiplied, and the next cut's keys looked up before
    # the values of this one: otherwise each load would wait for the memory in turn.
    at, is_real = _find_cut(
        tl.program_id(2), table, indices_ptr, end, K, stride_block, stride_offset, BLOCK_SIZE, CUT
    )  # fmt: skip
    for i in tl.range(tl.program_id(2), stop, tl.num_programs(2), num_stages=1):
        scores = tl.zeros((BLOCK_H, CUT), tl.float32)
        once = tl.minimum(stop - i, 1)
        latents = ()
        numbers, factor = _load_chunk(cache_ptr, scales_ptr, at, is_real, 0, WIDTH, LATENT)
        for c in tl.static_range(CHUNKS):
            chunk = _to_values(numbers, factor, q_ptr.dtype.element_ty, WIDEN)
            if c + 1 < CHUNKS:
                numbers, factor = _load_chunk(cache_ptr, scales_ptr, at, is_real, (c + 1) * WIDTH, WIDTH, LATENT)
            elif ROTARY > 0:
                rotary = _load_rotary(
                    cache_ptr, rotary_ptr, at, is_real, LATENT, ROTARY, GROUPS, BLOCK_R, q_ptr.dtype.element_ty
                )  # fmt: skip
            latents = latents + (chunk,)  # type: ignore[assignment]
            scores = _dot_in_loop(q[c], tl.trans(chunk), scores, once, WIDEN)
        is_seen = is_real
        at, is_real = _find_cut(
            i + tl.num_programs(2), table, indices_ptr, end, K, stride_block, stride_offset, BLOCK_SIZE, CUT
        )  # fmt: skip
        if ROTARY > 0:
            scores = _dot_in_loop(q_rotary, tl.trans(rotary), scores, once, WIDEN)
        cut_top, weights = exp_scores(scores, is_seen[None, :], scale)
        weights = weights.to(q_ptr.dtype.element_ty)
        cut_total = total_of(weights, WIDEN)
        if WALKS:
            top, keep, add = rescale_factors(top, cut_top)
            total = tl.fma(cut_total, add, total * keep)
        else:
            tl.store(top_ptr + row * cuts + i, cut_top, mask=heads < HQ)
            tl.store(total_ptr + row * cuts + i, cut_total, mask=heads < HQ)
        sums = ()
        for c in tl.static_range(CHUNKS):
            cut_out = dot(weights, latents[c], tl.zeros((BLOCK_H, WIDTH), tl.float32), WIDEN)
            if WALKS:
                sums = sums + (add_rescaled(out[c], cut_out, keep, add),)  # type: ignore[assignment]
            else:
                channels = c * WIDTH + tl.arange(0, WIDTH)[None, :]
                to = out_ptr + (row * cuts + i)[:, None] * LATENT + channels
                tl.store(to, cut_out, mask=is_head & (channels < LATENT))
        if WALKS:
            out = sums
    if WALKS:
        for c in tl.static_range(CHUNKS):
            channels = c * WIDTH + tl.arange(0, WIDTH)[None, :]
            y = divided(out[c], tl.broadcast_to(total[:, None], out[c].shape)).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row[:, None] * LATENT + channels, y, mask=is_head & (channels < LATENT))


@triton.jit
def _latent_fold_kernel(
    out_ptr,
    top_ptr,
    total_ptr,
    starts_ptr,
    lengths_ptr,
    indices_ptr,
    y_ptr,
    cuts,
    K,
    B,
    HQ: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    MORE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the cuts of one token and head in order, for some channels. MORE of them are loaded together."""
    begin(OVERLAP)
    b, end = sequence_of(tl.program_id(0), starts_ptr, lengths_ptr, B, BLOCK_B)
    stop = _num_cuts(b, end, lengths_ptr, indices_ptr, K, B, CUT)
    channels = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * HQ + tl.program_id(1)
    follow(OVERLAP)
    out, total = fold_stored(out_ptr, top_ptr, total_ptr, row * cuts, 0, stop, channels, LATENT, MORE)
    tl.store(y_ptr + row * LATENT + channels, divided(out, total).to(y_ptr.dtype.element_ty), mask=channels < LATENT)


def forward(q: Tensor, cache: Tensor, indices: Tensor | None, scale: float, value_dim: int, **tables: Any) -> Tensor:
    tokens, heads, dim = q.shape
    y = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    if not y.numel():
        return y
    q, cache, block_tables = (unit_stride(x) for x in (q, cache, tables["block_tables"]))
    indices = None if indices is None else unit_stride(indices)
    lengths = tables["query_starts"].contiguous(), tables["context_lens"].contiguous()
    is_coded = cache.dtype == torch.uint8
    pages = byte_views(cache) if is_coded else (cache, None, None)
    size, count = cut_of(q.dtype), len(lengths[1])
    most = block_tables.shape[1] * cache.shape[1] if indices is None else indices.shape[1]
    cuts = max(1, ceil_div(most, size))
    plan, programs = _plan(q, cuts, value_dim)
    # Only where operands pass through shared memory: elsewhere the width of a code would decide which columns tensor
    # cores add together.
    if is_coded and programs == 1 and plan["BLOCK_H"] == 64 and q.dtype == torch.bfloat16 and not is_interpreting():
        pages = (cache.view(torch.int32), *pages[1:])
    scratch = (0,) if programs == 1 else (tokens, heads, cuts)
    out = torch.empty(*scratch, value_dim, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(scratch, dtype=torch.float32, device=q.device) for _ in range(2))
    options = {"HQ": heads, "LATENT": value_dim, "BLOCK_B": block_of_sequences(count), "CUT": size}
    options |= {"enable_fp_fusion": False, **overlap(q)}
    width = max(16, min(CHANNELS, power_of_2(value_dim)))
    _latent_kernel[(ceil_div(heads, plan["BLOCK_H"]), tokens, programs)](
        q,
        *pages,
        block_tables,
        *lengths,
        indices,
        out,
        top,
        total,
        y,
        *q.stride()[:2],
        *cache.stride()[:2],
        block_tables.stride(0),
        0 if indices is None else indices.stride(0),
        scale * LOG2_E,
        cuts,
        most,
        count,
        ROTARY=dim - value_dim,
        GROUPS=ceil_div(value_dim, GROUP) if is_coded else 0,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_R=max(16, power_of_2(dim - value_dim)),
        WIDTH=width,
        CHUNKS=ceil_div(value_dim, width),
        WALKS=programs == 1,
        WIDEN=is_interpreting(),
        **plan,
        **options,
    )
    if programs > 1:
        _latent_fold_kernel[(tokens, heads, ceil_div(value_dim, width))](
            out,
            top,
            total,
            *lengths,
            indices,
            y,
            cuts,
            most,
            count,
            BLOCK=width,
            MORE=min(MORE, power_of_2(cuts)),
            num_warps=1,
            **options,
        )
    return y


def _plan(q: Tensor, cuts: int, value_dim: int) -> tuple[dict[str, Any], int]:
    """Return the heads per program, and the number of programs that share the cuts of a list.

    With fewer heads per program there are more programs, but each key is read more often.
    """
    tokens, heads, _ = q.shape
    if is_interpreting():
        return {"BLOCK_H": 16}, 1 if tokens > 4 else min(cuts, 3)
    if q.element_size() == 4:
        return {"BLOCK_H": 16, "num_warps": 8}, 1
    blocks = tokens * ceil_div(heads, 64)
    scratch = tokens * heads * cuts * value_dim * 4
    if cuts == 1 or 2 * blocks >= PROGRAMS or scratch > SCRATCH:
        return {"BLOCK_H": 64, "num_warps": 8}, 1
    block_h = next((n for n in (16, 32) if tokens * ceil_div(heads, n) * cuts <= PROGRAMS), 64)
    programs = PROGRAMS // (tokens * ceil_div(heads, block_h))
    return {"BLOCK_H": block_h, "num_warps": 8}, min(cuts, max(2, programs))
