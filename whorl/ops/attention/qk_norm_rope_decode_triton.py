# mypy: allow-untyped-defs
"""Norm, rotation, the write to the cache and attention of one token per sequence, in one kernel for short contexts.

A decoding token alone spends most of its time between kernels. Here every program normalises and rotates the queries of
its key head for itself, and the program of a sequence's last cut does so for the new key, too, puts it among the keys
that it has loaded, and writes it to the cache. No program reads from the cache what this step writes, so keys and
values are loaded before the kernel waits for the projection.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2
from .._varied import is_varied
from ..linear_triton import unit_stride
from ..rope.triton import angle_constants, load_angles, load_pair, rotated
from .cuts_triton import LOG2_E, cut, cut_of, load_cut
from .decode_triton import PROGRAMS, block_of_sequences, decode, fold_cuts, sequence_of
from .qk_norm_rope_triton import head_sum, inverse_rms, load_weight, token_rows, write


@triton.jit
def _heads(
    first, second, weight, cos, sin, eps, dtype: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Return heads, normalised and rotated, [HEADS, D] in `dtype`. first, second: of pairs, [1, HEADS, D / 2]."""
    inverse = inverse_rms(head_sum(tl.fma(first, first, second * second), D // 2), D, eps)
    first, second = rotated(first * inverse * weight[0], second * inverse * weight[1], cos, sin)
    both = tl.join(first, second)
    if not PAIRS:
        both = tl.permute(both, (0, 1, 3, 2))
    return tl.reshape(both, (HEADS, D)).to(dtype)


@launched
@triton.jit(do_not_specialize=["table_stride", "cuts", "B"])
def _rotate_decode_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    angles_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    top_ptr,
    total_ptr,
    qkv_stride,
    stride_block,
    stride_offset,
    stride_head,
    table_stride,
    eps,
    scale,
    window,
    cuts,
    T,
    B,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
    CUT: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one cut of one token and key head: num_programs(2) programs, one for each cut that there may be."""
    begin(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    b, end = sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B)
    first = tl.maximum(end - window, 0) if window > 0 else 0
    i = first // CUT + tl.program_id(2)
    if i * CUT >= end:
        if tl.program_id(2) == 0:  # or a step without any key would end before the kernels that it must follow
            follow(OVERLAP)
    else:
        last = end - 1  # the new key's position
        dtype = qkv_ptr.dtype.element_ty
        keys = i * CUT + tl.arange(0, CUT)
        k, v = load_cut(
            k_cache_ptr, v_cache_ptr, None, None, tables_ptr + b.to(tl.int64) * table_stride, keys, last, head,
            stride_block, stride_offset, stride_head, stride_block, stride_offset, stride_head, BLOCK_SIZE, HK, D, D,
            dtype, WIDEN,
        )  # fmt: skip
        q_weight = load_weight(q_weight_ptr, HALF, BLOCK_C, PAIRS, 0, 1, PLUS_ONE)
        k_weight = load_weight(k_weight_ptr, HALF, BLOCK_C, PAIRS, 0, 1, PLUS_ONE)
        tokens = token.to(tl.int64) + tl.zeros((1,), tl.int64)
        cos, sin = load_angles(angles_ptr, angles_ptr, tokens, T, T, HALF, BLOCK_C, AXES, S0, S1, S2, LAYOUT, False)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        follow(OVERLAP)
        row = tokens[:, None] * qkv_stride
        group, channels = tl.arange(0, BLOCK_G), tl.arange(0, D)
        q_at, is_head = row + (head * G + group)[None, :] * D, (group < G)[None, :]
        q_first, q_second = load_pair(qkv_ptr, q_at, is_head, HALF, BLOCK_C, PAIRS)
        one = tl.full((1, 1), True, tl.int1)
        k_first, k_second = load_pair(qkv_ptr, row + (HK * G + head) * D, one, HALF, BLOCK_C, PAIRS)
        v_new = tl.load(qkv_ptr + row + (HK * G + HK + head) * D + channels[None, :])
        q = _heads(q_first, q_second, q_weight, cos, sin, eps, dtype, BLOCK_G, D, PAIRS)
        k_new = _heads(k_first, k_second, k_weight, cos, sin, eps, dtype, 1, D, PAIRS)
        is_new = (keys == last)[:, None]
        k, v = tl.where(is_new, k_new, k), tl.where(is_new, v_new, v)
        if (i + 1) * CUT > last and slot >= 0:
            to = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_offset + head * stride_head
            tl.store(k_cache_ptr + to + channels[None, :], k_new)
            tl.store(v_cache_ptr + to + channels[None, :], v_new)
        top, total, out = cut(q, k, v, ((keys < end) & (keys >= first))[None, :], scale, WIDEN)
        at = (token.to(tl.int64) * (HK * G) + head * G + group) * cuts + i
        tl.store(top_ptr + at, top, mask=group < G)
        tl.store(total_ptr + at, total, mask=group < G)
        tl.store(out_ptr + at[:, None] * D + channels[None, :], out, mask=(group < G)[:, None])


def forward(out: Tensor, **arguments: Any) -> None:
    """Compute `qk_norm_rope_decode`: by one kernel and a fold where `_is_fused`, else by the kernels of its parts."""
    if not out.numel():
        return
    y = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    (_rotate_and_attend if _is_fused(y, **arguments) else _by_parts)(y, **arguments)
    if y is not out:
        out.copy_(y)


def _num_cuts(y: Tensor, k_cache: Tensor, block_tables: Tensor) -> int:
    """Return the most cuts that a sequence may have."""
    return max(1, ceil_div(block_tables.shape[1] * k_cache.shape[1], cut_of(y.dtype)))


def _is_fused(
    y: Tensor, *, cos_sin: Tensor, k_cache: Tensor, k_scale: Tensor | None, block_tables: Tensor, **_: object
) -> bool:
    """Return whether the one kernel takes these: whole heads rotate, and each cut has a program."""
    dim, cuts = y.shape[2], _num_cuts(y, k_cache, block_tables)
    is_whole = cos_sin.shape[-1] == dim == power_of_2(dim) and dim >= 16
    has_room = len(y) * k_cache.shape[2] * cuts <= PROGRAMS
    return is_whole and k_scale is None and cuts > 1 and has_room and not is_varied()


def _by_parts(
    y: Tensor,
    *,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    **arguments: Any,
) -> None:
    q, k, v = torch.empty_like(y), arguments["k_cache"], arguments["v_cache"]
    write(q=q, **arguments)
    tensors = [q, k, v, unit_stride(block_tables), query_starts.contiguous(), context_lens.contiguous()]
    strides = *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], tensors[3].stride(0)
    decode(tensors, (arguments["k_scale"], arguments["v_scale"]), strides, scale * LOG2_E, window, y)


def _rotate_and_attend(
    y: Tensor,
    *,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    k_scale: None,
    v_scale: None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    eps: float,
    plus_one: bool,
    style: str,
) -> None:
    rows, tables = token_rows(qkv), unit_stride(block_tables)
    starts, lengths = query_starts.contiguous(), context_lens.contiguous()
    cuts, (tokens, _, dim) = _num_cuts(y, k_cache, block_tables), y.shape
    top, total = (torch.empty(tokens, num_heads, cuts, dtype=torch.float32, device=y.device) for _ in range(2))
    out = torch.empty(tokens, num_heads, cuts, dim, dtype=torch.float32, device=y.device)
    _rotate_decode_kernel[(tokens, num_kv_heads, cuts)](
        rows,
        q_weight.contiguous(),
        k_weight.contiguous(),
        cos_sin.contiguous(),
        k_cache,
        v_cache,
        slots.contiguous(),
        tables,
        starts,
        lengths,
        out,
        top,
        total,
        rows.stride(0),
        *k_cache.stride()[:3],
        tables.stride(0),
        eps,
        scale * LOG2_E,
        window,
        cuts,
        tokens,
        len(lengths),
        HK=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_B=block_of_sequences(len(lengths)),
        BLOCK_G=max(16, power_of_2(num_heads // num_kv_heads)),
        PAIRS=style == "pairs",
        PLUS_ONE=plus_one,
        CUT=cut_of(y.dtype),
        WIDEN=is_interpreting(),
        num_warps=8,
        enable_fp_fusion=False,
        **angle_constants(dim, False, None, "chunked"),
        **overlap(rows),
    )
    fold_cuts([out, top, total], starts, lengths, y, window, cuts)
