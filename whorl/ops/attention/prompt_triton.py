# mypy: allow-untyped-defs
"""Attention of prompts in Triton: a program takes a tile of one sequence's queries, and one head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._hopper import gluon_reason
from .._launch_triton import launched
from .._rows import ceil_div, power_of_2
from .copied_rows import FEWEST_KEYS, box_of, rows_reason
from .cuts_triton import LN_2, Scales, add_mass, attention_weights, cut_of, fold, load_cut, start_fold, sum_values

FEW_SEQUENCES, MANY_SEQUENCES = 32, 256  # few are counted within one warp


@launched
@triton.jit(do_not_specialize=["table_stride", "B"])
def _prompt_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    y_ptr,
    lse_ptr,
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
    softcap,
    B,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    CUT: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_LSE: tl.constexpr,
    CAPPED: tl.constexpr,
):
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
        top, total = start_fold(sinks_ptr, head + tl.zeros((QUERIES,), tl.int32), True)
        out = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        mass = total  # that of the sink
        lowest = tl.min(position, 0)
        first = tl.maximum(lowest - window + 1, 0) // CUT * CUT if window > 0 else 0
        if HAS_LSE:  # training: keys lie beside their queries, without a block table
            table = None
            k_ptr = k_cache_ptr + start.to(tl.int64) * k_stride_offset
            v_ptr = v_cache_ptr + start.to(tl.int64) * v_stride_offset
        else:
            table = tables_ptr + b.to(tl.int64) * table_stride
            k_ptr, v_ptr = k_cache_ptr, v_cache_ptr
        # Cuts that every query attends to in full need no mask; a mask that hides nothing would change no bit.
        middle = tl.maximum((lowest + 1) // CUT * CUT, first) if window == 0 else first
        last = tl.minimum(length, lowest + QUERIES)
        for is_masked in tl.static_range(2):
            for at in range(middle if is_masked else first, last if is_masked else middle, CUT):
                keys = at + tl.arange(0, CUT)
                k, v = load_cut(
                    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, keys, length, head // G, k_stride_block,
                    k_stride_offset, k_stride_head, v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE, HQ // G,
                    D, BLOCK_D, q_ptr.dtype.element_ty, WIDEN,
                )  # fmt: skip
                visible = None
                if is_masked:
                    visible = keys[None, :] <= position[:, None]
                    if window > 0:
                        visible = visible & (keys[None, :] > position[:, None] - window)
                cut_top, weights = attention_weights(q, k, visible, scale, softcap, CAPPED, WIDEN)
                if HAS_LSE:
                    mass = add_mass(mass, weights, top, cut_top)
                cut_total, cut_out = sum_values(weights, v, WIDEN)
                top, total, out = fold(top, total, out, cut_top, cut_total, cut_out)
        y_at = y_ptr + (token[:, None] * HQ + head) * D + channels[None, :]
        y = tl.div_rn(out, tl.broadcast_to(total[:, None], out.shape))
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
        if HAS_LSE:
            tl.store(lse_ptr + token * HQ + head, (top + tl.log2(mass)) * LN_2, mask=query < count)


def prompt(
    tensors: list[Tensor],
    scales: Scales,
    strides: tuple[int, ...],
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Return attention of many queries per sequence, [T, HQ, D] like q.

    tensors: q, k_cache, v_cache, block_tables, query_starts, context_lens; scales: those of a cache of codes; strides:
    theirs, in the kernel's order; scale: includes log2(e). lse: [T, HQ] fp32, written, in training only; keys and
    values are then packed as q is, in one block of all tokens, and block_tables is not read.
    """
    q, k_cache, _, _, _, lengths = tensors
    tokens, heads, dim = q.shape
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # tokens of no sequence stay zero
    if not y.numel():
        return y
    count = lengths.shape[0]
    shapes = {
        "HQ": heads,
        "G": heads // k_cache.shape[2],
        "BLOCK_SIZE": k_cache.shape[1] if lse is None else 1,  # training has no blocks, but any number of tokens
        "BLOCK_B": sequence_block(count),
        "HAS_LSE": lse is not None,
        "enable_fp_fusion": False,
    }
    outputs = (y, y if lse is None else lse)
    if hopper_reason(tensors, strides, lse, softcap, sinks) is None:
        from .prompt_gluon_triton import run

        run(tensors, outputs, strides, scale, window, shapes)
        return y
    is_narrow, is_wide = q.element_size() == 2, dim > 128
    has_room = lse is None  # the sum for lse takes registers that 128 queries, or keys loaded ahead, would need
    queries = 16 if is_interpreting() else (128 if has_room else 64) if is_narrow and not is_wide else 32
    _prompt_kernel[(ceil_div(tokens, queries) + count, heads)](
        *tensors,
        *scales,
        sinks,
        *outputs,
        *strides,
        scale,
        window,
        softcap,
        count,
        D=dim,
        BLOCK_D=max(16, power_of_2(dim)),
        QUERIES=queries,
        CUT=cut_of(q.dtype),
        WIDEN=is_interpreting(),
        CAPPED=softcap > 0,
        # Dequantising and a softcap take registers.
        num_warps=8 if queries > 32 or (is_wide and (scales[0] is not None or softcap > 0)) else 4,
        num_stages=2 if has_room and not is_wide else 1,
        **shapes,
    )
    return y


def sequence_block(count: int) -> int:
    """Return the constant BLOCK_B for a number of sequences, which changes from step to step: one of few sizes."""
    return FEW_SEQUENCES if count <= FEW_SEQUENCES else max(MANY_SEQUENCES, power_of_2(count))


def hopper_reason(
    tensors: list[Tensor],
    strides: tuple[int, ...],
    lse: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> str | None:
    """Return None where the Hopper kernel takes these, else the reason that the plain one runs; the bits are equal."""
    q, k_cache, v_cache = tensors[:3]
    if softcap:
        return "has no softcap"
    if sinks is not None:
        return "has no sinks"
    if q.shape[2] != 128 or q.element_size() != 2:
        return f"takes 128 channels of 16 bits, got {q.shape[2]} of {q.dtype}"
    if k_cache.dtype != q.dtype:
        return f"copies keys unchanged to the tensor cores, but the cache holds codes, {k_cache.dtype}"
    if any(stride % 8 for stride in strides[:-1]) or any(not t.is_meta and t.data_ptr() % 16 for t in tensors[:3]):
        return "copies 16 bytes at a time, but rows are not aligned to 16 bytes"
    if lse is None and box_of(k_cache.shape[1]) < FEWEST_KEYS:
        return f"copies {FEWEST_KEYS} keys or more at a time, but blocks hold {k_cache.shape[1]}"
    for x, apart in ((q[None], (0, *strides[:2])), (k_cache, strides[2:5]), (v_cache, strides[5:8])):
        if (reason := rows_reason(x.shape, apart)) is not None:
            return reason
    return gluon_reason(q.device)
