"""Norm, rotation, cache write and attention of one new token a sequence, in one kernel."""

import torch
import triton
import triton.language as tl

from whorl.device import is_interpreting
from whorl.ops._overlap_triton import follow, overlap
from whorl.ops._rows import ceil_div, power_of_2
from whorl.ops._sums_triton import row_sum
from whorl.ops.attention.cuts_triton import LOG2_E, cut, cut_of, fold, load_cut
from whorl.ops.attention.decode_triton import _divided
from whorl.ops.rope.triton import rotated


@triton.jit
def _heads(ptr, stride, weight_ptr, cos, sin, mask, eps, ROWS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr):
    """[ROWS, 2 HALF] heads, normed and rotated, as they are stored."""
    channels = tl.arange(0, HALF)[None, :]
    at = ptr + tl.arange(0, ROWS)[:, None] * stride + channels
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        total = row_sum(tl.fma(first, first, second * second), ROWS, HALF)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(total / (2 * HALF) + eps))[:, None]
        first = first * inverse * tl.load(weight_ptr + channels).to(tl.float32)
        second = second * inverse * tl.load(weight_ptr + HALF + channels).to(tl.float32)
    first, second = rotated(first, second, cos, sin)
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (ROWS, 2 * HALF)).to(ptr.dtype.element_ty)


@triton.jit
def step_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    slots_ptr,
    lengths_ptr,
    out_ptr,
    top_ptr,
    total_ptr,
    done_ptr,
    y_ptr,
    qkv_stride,
    k_stride_block,
    k_stride_offset,
    k_stride_head,
    v_stride_block,
    v_stride_offset,
    v_stride_head,
    table_stride,
    scale,
    eps,
    cuts,
    HK: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CUT: tl.constexpr,
    FOLDS: tl.constexpr,
    NORMED: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    follow(OVERLAP)
    token, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(lengths_ptr + token)
    if i * CUT < end:
        keys = i * CUT + tl.arange(0, CUT)
        table = tables_ptr + token.to(tl.int64) * table_stride
        k, v = load_cut(
            k_cache_ptr,
            v_cache_ptr,
            None,
            None,
            table,
            keys,
            end - 1,
            head,
            k_stride_block,
            k_stride_offset,
            k_stride_head,
            v_stride_block,
            v_stride_offset,
            v_stride_head,
            BLOCK_SIZE,
            1,
            D,
            D,
            k_cache_ptr.dtype.element_ty,
            False,
        )
        half = tl.arange(0, HALF)[None, :]
        row_ptr = cos_sin_ptr + token.to(tl.int64) * D
        cos, sin = tl.load(row_ptr + half), tl.load(row_ptr + HALF + half)
        group = tl.arange(0, BLOCK_G)
        here = qkv_ptr + token.to(tl.int64) * qkv_stride
        is_head = (group < G)[:, None] & (half < HALF)
        q = _heads(here + head * G * D, D, q_weight_ptr, cos, sin, is_head, eps, BLOCK_G, HALF, NORMED)
        new_k = _heads(here + (HK * G + head) * D, D, k_weight_ptr, cos, sin, half < HALF, eps, 1, HALF, NORMED)
        channels = tl.arange(0, D)[None, :]
        new_v = tl.load(here + (HK * G + HK + head) * D + channels)
        if i == (end - 1) // CUT:
            slot = tl.load(slots_ptr + token).to(tl.int64)
            if slot >= 0:
                block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
                tl.store(
                    k_cache_ptr + block * k_stride_block + offset * k_stride_offset + head * k_stride_head + channels,
                    new_k,
                )
                tl.store(
                    v_cache_ptr + block * v_stride_block + offset * v_stride_offset + head * v_stride_head + channels,
                    new_v,
                )
        is_new = (keys == end - 1)[:, None]
        k, v = tl.where(is_new, new_k, k), tl.where(is_new, new_v, v)
        cut_top, cut_total, cut_out = cut(q, k, v, (keys < end)[None, :], scale, WIDEN)
        row = token.to(tl.int64) * (HK * G) + head * G + group
        mask = (group < G)[:, None] & (channels < D)
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        out = tl.zeros((BLOCK_G, D), tl.float32)
        count = tl.cdiv(end, CUT)
        y_at = y_ptr + row[:, None] * D + channels
        if count == 1:
            top, total, out = fold(top, total, out, cut_top, cut_total, cut_out)
            y = _divided(out, tl.broadcast_to(total[:, None], out.shape))
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            at = row * cuts
            tl.store(top_ptr + at + i, cut_top, mask=group < G)
            tl.store(total_ptr + at + i, cut_total, mask=group < G)
            tl.store(out_ptr + (at + i)[:, None] * D + channels, cut_out, mask=mask)
            if count <= FOLDS:
                tl.debug_barrier()  # all of this program's stores are before the count
                before = tl.atomic_add(done_ptr + token * HK + head, 1, sem="acq_rel")
                if before == count - 1:  # the last one folds, in order
                    tl.store(done_ptr + token * HK + head, 0)
                    for j in range(0, count):
                        cut_top = tl.load(top_ptr + at + j, mask=group < G, other=float("-inf"), cache_modifier=".cg")
                        cut_total = tl.load(total_ptr + at + j, mask=group < G, other=0.0, cache_modifier=".cg")
                        cut_out = tl.load(
                            out_ptr + (at + j)[:, None] * D + channels, mask=mask, other=0.0, cache_modifier=".cg"
                        )
                        top, total, out = fold(top, total, out, cut_top, cut_total, cut_out)
                    y = _divided(out, tl.broadcast_to(total[:, None], out.shape))
                    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def attend(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    k_cache,
    v_cache,
    tables,
    slots,
    lengths,
    done,
    *,
    heads,
    eps,
    scale,
    folds=16,
    num_warps=8,
    num_stages=1,
):
    tokens, (block_size, kv_heads, dim) = len(qkv), k_cache.shape[1:]
    y = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    size = cut_of(qkv.dtype)
    cuts = max(1, ceil_div(tables.shape[1] * block_size, size))
    assert cuts <= folds
    out = torch.empty(tokens, heads, cuts, dim, dtype=torch.float32, device=qkv.device)
    top, total = (torch.empty(tokens, heads, cuts, dtype=torch.float32, device=qkv.device) for _ in range(2))
    step_kernel[(tokens, kv_heads, cuts)](
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        k_cache,
        v_cache,
        tables,
        slots,
        lengths,
        out,
        top,
        total,
        done,
        y,
        qkv.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        tables.stride(0),
        scale * LOG2_E,
        eps,
        cuts,
        HK=kv_heads,
        G=heads // kv_heads,
        HALF=dim // 2,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(16, power_of_2(heads // kv_heads)),
        CUT=size,
        FOLDS=folds,
        NORMED=q_weight is not None,
        WIDEN=is_interpreting(),
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
        **overlap(qkv),
    )
    return y
