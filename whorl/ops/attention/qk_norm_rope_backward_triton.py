# mypy: allow-untyped-defs
"""The backward of `qk_norm_rope`: heads are normalised again, which costs less than saving the normalised heads."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors

from .._rows import ceil_div, flat_rows, unit_stride
from ..rope.triton import flat_table, load_angles, load_pair, store_pair, token_strides
from .qk_norm_rope_triton import (
    copy_heads,
    head_groups,
    inverse_rms,
    launch_constants,
    load_tail,
    load_weight,
    store_tail,
)

STAGES = 1  # blocks of tokens in flight


@triton.jit
def _norm_rotate_heads_backward(
    dy_ptr,
    x_ptr,
    dx_ptr,
    dy_at,
    x_at,
    dx_at,
    mask,
    table_ptr,
    positions_ptr,
    tokens,
    T,
    P,
    w_first,
    w_second,
    w_tail,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """Store dx, and return these heads' part of the weight gradient before summing, [BLOCK_T, BLOCK_H, channels]."""
    first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
    dy_first, dy_second = load_pair(dy_ptr, dy_at, mask, HALF, BLOCK_C, PAIRS)
    tail = load_tail(x_ptr, x_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
    d_tail = load_tail(dy_ptr, dy_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
    cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, HAS_POSITIONS, False)
    total = tl.sum(first * first + second * second, 2) + tl.sum(tail * tail, 2)
    inverse = inverse_rms(total, D, eps)
    first, second, tail = first * inverse, second * inverse, tail * inverse
    d_first = dy_first * cos + dy_second * sin
    d_second = dy_second * cos - dy_first * sin
    dw_first, dw_second, dw_tail = d_first * first, d_second * second, d_tail * tail
    d_first, d_second, d_tail = d_first * w_first, d_second * w_second, d_tail * w_tail
    dot = tl.sum(d_first * first + d_second * second, 2) + tl.sum(d_tail * tail, 2)
    mean = (dot / D)[:, :, None]
    dx_first, dx_second = inverse * (d_first - first * mean), inverse * (d_second - second * mean)
    store_pair(dx_ptr, dx_at, mask, dx_first, dx_second, HALF, BLOCK_C, PAIRS)
    store_tail(dx_ptr, dx_at, mask, inverse * (d_tail - tail * mean), 2 * HALF, D - 2 * HALF, BLOCK_REST)
    return dw_first, dw_second, dw_tail


@triton.jit
def _at_tokens(tokens, S, stride_b, stride_s, BATCHED: tl.constexpr):
    """The offsets of the tokens of [B, S, ...] or [T, ...], [BLOCK_T, 1]."""
    at = tokens // S * stride_b + tokens % S * stride_s if BATCHED else tokens * stride_s
    return at[:, None]


@triton.jit
def _over_heads(x):
    """Sum [BLOCK_T, BLOCK_H, channels] over tokens and heads, to [1, 1, channels]."""
    return tl.sum(tl.sum(x, 1), 0)[None, None, :]


@triton.jit
def _qk_norm_rope_backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    dqkv_ptr,
    partial_ptr,
    table_ptr,
    positions_ptr,
    T,
    S,
    P,
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    dk_stride_b,
    dk_stride_s,
    dk_stride_h,
    dv_stride_b,
    dv_stride_s,
    dv_stride_h,
    qkv_stride,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BATCHED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (group, i) takes every num_programs-th block of tokens of one group of heads, of q, of k or of v.

    Its part of the weight gradient is stored in partial[i, group]; partial: [num_programs, q and k groups, D].
    """
    q_groups: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    k_groups: tl.constexpr = (HK + BLOCK_H - 1) // BLOCK_H
    group = tl.program_id(0)
    offset = tl.arange(0, BLOCK_T).to(tl.int64)
    first_block = tl.program_id(1).to(tl.int64)
    if group < q_groups + k_groups:
        if group < q_groups:
            heads = (group * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
            is_head = heads < HQ
            columns = heads * D
            dy_ptr, weight_ptr = dq_ptr, q_weight_ptr
            stride_b, stride_s, stride_h = dq_stride_b, dq_stride_s, dq_stride_h
        else:
            heads = ((group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
            is_head = heads < HK
            columns = (HQ + heads) * D
            dy_ptr, weight_ptr = dk_ptr, k_weight_ptr
            stride_b, stride_s, stride_h = dk_stride_b, dk_stride_s, dk_stride_h
        w_first, w_second, w_tail = load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
        dw_first = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_C), tl.float32)
        dw_second = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_C), tl.float32)
        dw_tail = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_REST), tl.float32)
        for block in tl.range(first_block, tl.cdiv(T, BLOCK_T), tl.num_programs(1), num_stages=STAGES):
            tokens = block * BLOCK_T + offset
            dy_at = _at_tokens(tokens, S, stride_b, stride_s, BATCHED) + heads * stride_h
            x_at, dx_at = (tokens * qkv_stride)[:, None] + columns, (tokens * ((HQ + 2 * HK) * D))[:, None] + columns
            more_first, more_second, more_tail = _norm_rotate_heads_backward(
                dy_ptr, qkv_ptr, dqkv_ptr, dy_at, x_at, dx_at, (tokens < T)[:, None] & is_head,
                table_ptr, positions_ptr, tokens, T, P, w_first, w_second, w_tail, eps,
                D, HALF, BLOCK_C, BLOCK_REST, PAIRS, HAS_POSITIONS,
            )  # fmt: skip
            dw_first += more_first
            dw_second += more_second
            dw_tail += more_tail
        at = (first_block * (q_groups + k_groups) + group) * D + tl.zeros((1, 1), tl.int64)
        every = tl.full((1, 1), True, tl.int1)
        store_pair(partial_ptr, at, every, _over_heads(dw_first), _over_heads(dw_second), HALF, BLOCK_C, PAIRS)
        store_tail(partial_ptr, at, every, _over_heads(dw_tail), 2 * HALF, D - 2 * HALF, BLOCK_REST)
    else:
        heads = ((group - q_groups - k_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        for block in range(first_block, tl.cdiv(T, BLOCK_T), tl.num_programs(1)):
            tokens = block * BLOCK_T + offset
            dy_at = _at_tokens(tokens, S, dv_stride_b, dv_stride_s, BATCHED) + heads * dv_stride_h
            dx_at = (tokens * ((HQ + 2 * HK) * D))[:, None] + (HQ + HK + heads) * D
            copy_heads(dv_ptr, dqkv_ptr, dy_at, dx_at, (tokens < T)[:, None] & (heads < HK), D, BLOCK_D)


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor | None,
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    hq, hk = num_heads, num_kv_heads
    q_weight, k_weight = options["q_weight"], options["k_weight"]
    rows, dim = flat_rows(qkv), qkv.shape[-1] // (hq + 2 * hk)
    dq, dk, dv = unit_stride(dq), unit_stride(dk), None if dv is None else unit_stride(dv)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if dv is None:
        dqkv[..., (hq + hk) * dim :] = 0
    table, index = flat_table(cos_sin, positions)
    constants = launch_constants(
        hq, hk, dim, cos_sin.shape[-1], positions is not None, options["style"], options["plus_one"]
    )
    groups = head_groups((hq, hk), constants["BLOCK_H"])
    num_groups = sum(groups[: 2 if dv is None else 3])
    waves = 16 * multiprocessors(qkv.device) // num_groups
    programs = max(1, min(ceil_div(rows.shape[0], constants["BLOCK_T"]), waves))
    partial = torch.empty(programs, groups[0] + groups[1], dim, dtype=torch.float32, device=qkv.device)
    dv_in = dk if dv is None else dv  # not read where dv is None
    _qk_norm_rope_backward_kernel[(num_groups, programs)](
        dq,
        dk,
        dv_in,
        rows,
        q_weight.contiguous(),
        k_weight.contiguous(),
        dqkv,
        partial,
        table,
        index,
        rows.shape[0],
        max(1, dq.shape[-3]),
        table.shape[0],
        *token_strides(dq.stride()),
        *token_strides(dk.stride()),
        *token_strides(dv_in.stride()),
        rows.stride(0),
        options["eps"],
        **constants,
        BATCHED=dq.dim() == 4,
        STAGES=STAGES,
    )
    dq_weight, dk_weight = partial[:, : groups[0]].sum((0, 1)), partial[:, groups[0] :].sum((0, 1))
    return dqkv, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype)
