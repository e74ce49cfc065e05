"""Norm, rotation and unpacking of a qkv projection in one pass.

A program takes a run of tokens and walks their q, k and v heads, with the angles of its tokens loaded once. A head's
channels stay in registers between the norm and the rotation.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors

from .rope.triton import angle_constants, flat_table, load_angles, load_pair, store_pair, token_strides


@triton.jit
def _load_rest(x_ptr, at, mask, REST_START: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr):
    channels = REST_START + tl.arange(0, BLOCK_REST)
    inside = mask[:, :, None] & (channels < REST_START + REST)
    return tl.load(x_ptr + at[:, :, None] + channels, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rest(y_ptr, at, mask, rest, REST_START: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr):
    channels = REST_START + tl.arange(0, BLOCK_REST)
    inside = mask[:, :, None] & (channels < REST_START + REST)
    tl.store(y_ptr + at[:, :, None] + channels, rest.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_weight(
    weight_ptr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """The weight in the order of load_pair, and its tail, [1, 1, ...]."""
    at = tl.zeros((1, 1), tl.int64)
    mask = tl.full((1, 1), True, tl.int1)
    first, second = load_pair(weight_ptr, at, mask, HALF, BLOCK_C, PAIRS)
    rest = _load_rest(weight_ptr, at, mask, 2 * HALF, REST, BLOCK_REST)
    if PLUS_ONE:
        first += 1.0
        second += 1.0
        rest += 1.0
    return first, second, rest


@triton.jit
def _copy_heads(
    x_ptr,
    y_ptr,
    x_token,
    y_token,
    x_stride_h,
    y_stride_h,
    is_token,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    for start in tl.static_range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        mask = is_token[:, None] & (heads < H)[None, :]
        x = _load_rest(x_ptr, x_token[:, None] + heads[None, :] * x_stride_h, mask, 0, D, BLOCK_D)
        _store_rest(y_ptr, y_token[:, None] + heads[None, :] * y_stride_h, mask, x, 0, D, BLOCK_D)


@triton.jit
def _norm_rotate_heads(
    x_ptr,
    y_ptr,
    weight_ptr,
    x_token,
    y_token,
    is_token,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    w_first, w_second, w_rest = _load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
    for start in tl.static_range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        mask = is_token[:, None] & (heads < H)[None, :]
        x_at = x_token[:, None] + heads[None, :] * D
        y_at = y_token[:, None] + heads[None, :] * D
        first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
        total = tl.sum(first * first + second * second, 2)
        if D > 2 * HALF:
            rest = _load_rest(x_ptr, x_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
            total += tl.sum(rest * rest, 2)
        inverse = tl.rsqrt(total / D + eps)[:, :, None]
        first, second = first * inverse * w_first, second * inverse * w_second
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        store_pair(y_ptr, y_at, mask, turned_first, turned_second, HALF, BLOCK_C, PAIRS)
        if D > 2 * HALF:
            _store_rest(y_ptr, y_at, mask, rest * inverse * w_rest, 2 * HALF, D - 2 * HALF, BLOCK_REST)


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    positions_ptr,
    T,
    P,
    qkv_stride,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < T
    cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, AXES, S0, S1, S2, LAYOUT, False)
    x_token = tokens * qkv_stride
    _norm_rotate_heads(
        qkv_ptr, q_ptr, q_weight_ptr, x_token, tokens * (HQ * D), is_token, cos, sin, eps,
        HQ, D, HALF, BLOCK_HQ, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE,
    )  # fmt: skip
    _norm_rotate_heads(
        qkv_ptr, k_ptr, k_weight_ptr, x_token + HQ * D, tokens * (HK * D), is_token, cos, sin, eps,
        HK, D, HALF, BLOCK_HK, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE,
    )  # fmt: skip
    _copy_heads(qkv_ptr, v_ptr, x_token + (HQ + HK) * D, tokens * (HK * D), D, D, is_token, HK, D, BLOCK_HK, BLOCK_D)


@triton.jit
def _norm_rotate_heads_backward(
    dy_ptr,
    x_ptr,
    dx_ptr,
    weight_ptr,
    dy_token,
    dy_stride_h,
    x_token,
    dx_token,
    is_token,
    cos,
    sin,
    dw_first,
    dw_second,
    dw_rest,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Writes dx and returns the weight gradient so far, [BLOCK_C], [BLOCK_C], [BLOCK_REST]."""
    w_first, w_second, w_rest = _load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
    for start in tl.static_range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        mask = is_token[:, None] & (heads < H)[None, :]
        dy_at = dy_token[:, None] + heads[None, :] * dy_stride_h
        x_at = x_token[:, None] + heads[None, :] * D
        dx_at = dx_token[:, None] + heads[None, :] * D
        first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
        dy_first, dy_second = load_pair(dy_ptr, dy_at, mask, HALF, BLOCK_C, PAIRS)
        total = tl.sum(first * first + second * second, 2)
        if D > 2 * HALF:
            rest = _load_rest(x_ptr, x_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
            total += tl.sum(rest * rest, 2)
        inverse = tl.rsqrt(total / D + eps)[:, :, None]
        first, second = first * inverse, second * inverse
        d_first = dy_first * cos + dy_second * sin
        d_second = dy_second * cos - dy_first * sin
        dw_first += tl.sum(tl.sum(d_first * first, 1), 0)
        dw_second += tl.sum(tl.sum(d_second * second, 1), 0)
        d_first, d_second = d_first * w_first, d_second * w_second
        dot = tl.sum(d_first * first + d_second * second, 2)
        if D > 2 * HALF:
            rest = rest * inverse
            d_rest = _load_rest(dy_ptr, dy_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
            dw_rest += tl.sum(tl.sum(d_rest * rest, 1), 0)
            d_rest = d_rest * w_rest
            dot += tl.sum(d_rest * rest, 2)
        mean = (dot / D)[:, :, None]
        dx_first, dx_second = inverse * (d_first - first * mean), inverse * (d_second - second * mean)
        store_pair(dx_ptr, dx_at, mask, dx_first, dx_second, HALF, BLOCK_C, PAIRS)
        if D > 2 * HALF:
            _store_rest(dx_ptr, dx_at, mask, inverse * (d_rest - rest * mean), 2 * HALF, D - 2 * HALF, BLOCK_REST)
    return dw_first, dw_second, dw_rest


@triton.jit
def _store_weight_gradient(
    out_ptr,
    first,
    second,
    rest,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
):
    at = tl.zeros((1, 1), tl.int64)
    mask = tl.full((1, 1), True, tl.int1)
    store_pair(out_ptr, at, mask, first[None, None, :], second[None, None, :], HALF, BLOCK_C, PAIRS)
    if REST > 0:
        _store_rest(out_ptr, at, mask, rest[None, None, :], 2 * HALF, REST, BLOCK_REST)


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
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Each program takes every num_programs-th block of tokens; partial: [num_programs, 2, D] weight gradients."""
    program = tl.program_id(0).to(tl.int64)
    q_first = tl.zeros((BLOCK_C,), tl.float32)
    q_second = tl.zeros((BLOCK_C,), tl.float32)
    q_rest = tl.zeros((BLOCK_REST,), tl.float32)
    k_first = tl.zeros((BLOCK_C,), tl.float32)
    k_second = tl.zeros((BLOCK_C,), tl.float32)
    k_rest = tl.zeros((BLOCK_REST,), tl.float32)
    for block in range(program, tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        tokens = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        is_token = tokens < T
        cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, AXES, S0, S1, S2, LAYOUT, False)
        b, s = tokens // S, tokens % S
        x_token = tokens * qkv_stride
        dx_token = tokens * ((HQ + 2 * HK) * D)
        q_first, q_second, q_rest = _norm_rotate_heads_backward(
            dq_ptr, qkv_ptr, dqkv_ptr, q_weight_ptr, b * dq_stride_b + s * dq_stride_s, dq_stride_h, x_token, dx_token,
            is_token, cos, sin, q_first, q_second, q_rest, eps,
            HQ, D, HALF, BLOCK_HQ, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE,
        )  # fmt: skip
        k_first, k_second, k_rest = _norm_rotate_heads_backward(
            dk_ptr, qkv_ptr, dqkv_ptr, k_weight_ptr, b * dk_stride_b + s * dk_stride_s, dk_stride_h,
            x_token + HQ * D, dx_token + HQ * D, is_token, cos, sin, k_first, k_second, k_rest, eps,
            HK, D, HALF, BLOCK_HK, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE,
        )  # fmt: skip
        _copy_heads(
            dv_ptr, dqkv_ptr, b * dv_stride_b + s * dv_stride_s, dx_token + (HQ + HK) * D, dv_stride_h, D, is_token,
            HK, D, BLOCK_HK, BLOCK_D,
        )  # fmt: skip
    partial_ptr += program * (2 * D)
    _store_weight_gradient(partial_ptr, q_first, q_second, q_rest, HALF, BLOCK_C, D - 2 * HALF, BLOCK_REST, PAIRS)
    _store_weight_gradient(partial_ptr + D, k_first, k_second, k_rest, HALF, BLOCK_C, D - 2 * HALF, BLOCK_REST, PAIRS)


def forward(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None,
    heads: tuple[int, int],
    eps: float,
    plus_one: bool,
    sections: Sequence[int] | None,
    layout: str,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, (hq, hk), dim = _rows(qkv), heads, qkv.shape[-1] // (heads[0] + 2 * heads[1])
    q, k, v = (qkv.new_empty(*qkv.shape[:-1], h, dim) for h in (hq, hk, hk))
    if not rows.shape[0]:
        return q, k, v
    table, index = flat_table(cos_sin, positions)
    constants = _constants(hq, hk, dim, cos_sin, positions, sections, layout, style, plus_one)
    constants["BLOCK_T"] = 1
    _qk_norm_rope_kernel[(triton.cdiv(rows.shape[0], constants["BLOCK_T"]),)](
        rows,
        q_weight.contiguous(),
        k_weight.contiguous(),
        q,
        k,
        v,
        table,
        index,
        rows.shape[0],
        table.shape[0],
        rows.stride(0),
        eps,
        **constants,
    )
    return q, k, v


def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None,
    heads: tuple[int, int],
    eps: float,
    plus_one: bool,
    sections: Sequence[int] | None,
    layout: str,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, (hq, hk), dim = _rows(qkv), heads, qkv.shape[-1] // (heads[0] + 2 * heads[1])
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in grads)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    table, index = flat_table(cos_sin, positions)
    constants = _constants(hq, hk, dim, cos_sin, positions, sections, layout, style, plus_one)
    constants["BLOCK_T"] = 1
    programs = max(1, min(rows.shape[0], 8 * multiprocessors(qkv.device)))
    partial = torch.empty(programs, 2, dim, dtype=torch.float32, device=qkv.device)
    _qk_norm_rope_backward_kernel[(programs,)](
        dq,
        dk,
        dv,
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
        *token_strides(dq),
        *token_strides(dk),
        *token_strides(dv),
        rows.stride(0),
        eps,
        **constants,
    )
    dq_weight, dk_weight = partial.sum(0)
    return dqkv, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype)


def _rows(x: Tensor) -> Tensor:
    """[T, C] with unit stride along C: a view where strides allow one."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _constants(
    heads: int,
    kv_heads: int,
    dim: int,
    cos_sin: Tensor,
    positions: Tensor | None,
    sections: Sequence[int] | None,
    layout: str,
    style: str,
    plus_one: bool,
) -> dict[str, int]:
    block_d = triton.next_power_of_2(dim)
    at_once = max(1, 4096 // block_d)  # heads a step
    return {
        "HQ": heads,
        "HK": kv_heads,
        "D": dim,
        "BLOCK_HQ": min(triton.next_power_of_2(heads), at_once),
        "BLOCK_HK": min(triton.next_power_of_2(kv_heads), at_once),
        "BLOCK_REST": triton.next_power_of_2(max(1, dim - cos_sin.shape[-1])),
        "BLOCK_D": block_d,
        "PAIRS": style == "pairs",
        "PLUS_ONE": plus_one,
        "num_warps": 4,
        **angle_constants(cos_sin.shape[-1], positions, sections, layout),
    }
