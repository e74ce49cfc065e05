"""Norm, rotation and unpacking of a qkv projection in one pass.

A head's channels stay in registers between the norm and the rotation.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors

from ._op import Values
from ._overlap import follow, overlap
from ._rows import ceil_div, power_of_2
from .rope.triton import angle_constants, flat_table, load_angles, load_pair, store_pair, token_strides

STAGES = 1  # blocks of tokens in flight in the backward


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
def _copy_heads(x_ptr, y_ptr, x_at, y_at, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    _store_rest(y_ptr, y_at, mask, _load_rest(x_ptr, x_at, mask, 0, D, BLOCK_D), 0, D, BLOCK_D)


@triton.jit
def _inverse_rms(total, D: tl.constexpr, eps):
    """Correctly rounded: one a head, where the fast reciprocal root would be the largest error in fp32."""
    return tl.div_rn(1.0, tl.sqrt_rn(total / D + eps))[:, :, None]


@triton.jit
def _norm_rotate_heads(
    x_ptr,
    y_ptr,
    weight_ptr,
    x_at,
    y_at,
    mask,
    table_ptr,
    positions_ptr,
    tokens,
    T,
    P,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    # Heads first: a warp issues in order, and the table row has to wait for its position.
    first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
    w_first, w_second, w_rest = _load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
    cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, AXES, S0, S1, S2, LAYOUT, False)
    total = tl.sum(first * first + second * second, 2)
    if D > 2 * HALF:
        rest = _load_rest(x_ptr, x_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
        total += tl.sum(rest * rest, 2)
    inverse = _inverse_rms(total, D, eps)
    first, second = first * inverse * w_first, second * inverse * w_second
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    store_pair(y_ptr, y_at, mask, turned_first, turned_second, HALF, BLOCK_C, PAIRS)
    if D > 2 * HALF:
        _store_rest(y_ptr, y_at, mask, rest * inverse * w_rest, 2 * HALF, D - 2 * HALF, BLOCK_REST)


@triton.jit
def _places(slots_ptr, tokens, is_token, width: tl.constexpr, block_stride, offset_stride, CACHE_BLOCK: tl.constexpr):
    """Where the keys or values of these tokens go, [BLOCK_T, 1], and which go anywhere."""
    if CACHE_BLOCK == 0:
        places = (tokens * width)[:, None]
    else:
        slots = tl.load(slots_ptr + tokens[:, None], mask=is_token, other=-1).to(tl.int64)
        places = slots // CACHE_BLOCK * block_stride + slots % CACHE_BLOCK * offset_stride
        is_token = is_token & (slots >= 0)
    return places, is_token


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
    slots_ptr,
    T,
    P,
    qkv_stride,
    q_stride_t,
    q_stride_h,
    block_stride,
    offset_stride,
    head_stride,
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
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes a group of BLOCK_H heads, of q, of k or of v, of BLOCK_T tokens; GROUPS says whether v is one.

    k and v go to contiguous tensors, or, with CACHE_BLOCK tokens a block, into the paged cache.
    """
    follow(OVERLAP)
    q_groups: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    k_groups: tl.constexpr = (HK + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    group = program % GROUPS
    tokens = (program // GROUPS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = (tokens < T)[:, None]
    x_token = (tokens * qkv_stride)[:, None]
    if group < q_groups:
        heads = (group * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        x_at, y_at = x_token + heads * D, (tokens * q_stride_t)[:, None] + heads * q_stride_h
        _norm_rotate_heads(
            qkv_ptr, q_ptr, q_weight_ptr, x_at, y_at, is_token & (heads < HQ), table_ptr, positions_ptr, tokens,
            T, P, eps, D, HALF, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE, AXES, S0, S1, S2, LAYOUT,
        )  # fmt: skip
    elif group < q_groups + k_groups:
        heads = ((group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        y_token, is_token = _places(
            slots_ptr, tokens, is_token, HK * D, block_stride, offset_stride, CACHE_BLOCK
        )  # fmt: skip
        x_at, y_at = x_token + (HQ + heads) * D, y_token + heads * head_stride
        _norm_rotate_heads(
            qkv_ptr, k_ptr, k_weight_ptr, x_at, y_at, is_token & (heads < HK), table_ptr, positions_ptr, tokens,
            T, P, eps, D, HALF, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE, AXES, S0, S1, S2, LAYOUT,
        )  # fmt: skip
    else:
        heads = ((group - q_groups - k_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        y_token, is_token = _places(
            slots_ptr, tokens, is_token, HK * D, block_stride, offset_stride, CACHE_BLOCK
        )  # fmt: skip
        x_at, y_at = x_token + (HQ + HK + heads) * D, y_token + heads * head_stride
        _copy_heads(qkv_ptr, v_ptr, x_at, y_at, is_token & (heads < HK), D, BLOCK_D)


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
    w_rest,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Writes dx; returns these heads' share of the weight gradient, lane by lane, [BLOCK_T, BLOCK_H, channels]."""
    first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
    dy_first, dy_second = load_pair(dy_ptr, dy_at, mask, HALF, BLOCK_C, PAIRS)
    rest = _load_rest(x_ptr, x_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
    d_rest = _load_rest(dy_ptr, dy_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
    cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, AXES, S0, S1, S2, LAYOUT, False)
    total = tl.sum(first * first + second * second, 2) + tl.sum(rest * rest, 2)
    inverse = _inverse_rms(total, D, eps)
    first, second, rest = first * inverse, second * inverse, rest * inverse
    d_first = dy_first * cos + dy_second * sin
    d_second = dy_second * cos - dy_first * sin
    dw_first, dw_second, dw_rest = d_first * first, d_second * second, d_rest * rest
    d_first, d_second, d_rest = d_first * w_first, d_second * w_second, d_rest * w_rest
    dot = tl.sum(d_first * first + d_second * second, 2) + tl.sum(d_rest * rest, 2)
    mean = (dot / D)[:, :, None]
    dx_first, dx_second = inverse * (d_first - first * mean), inverse * (d_second - second * mean)
    store_pair(dx_ptr, dx_at, mask, dx_first, dx_second, HALF, BLOCK_C, PAIRS)
    _store_rest(dx_ptr, dx_at, mask, inverse * (d_rest - rest * mean), 2 * HALF, D - 2 * HALF, BLOCK_REST)
    return dw_first, dw_second, dw_rest


@triton.jit
def _at_tokens(tokens, S, stride_b, stride_s, BATCHED: tl.constexpr):
    """Where the tokens of [B, S, ...] or [T, ...] start, [BLOCK_T, 1]."""
    at = tokens // S * stride_b + tokens % S * stride_s if BATCHED else tokens * stride_s
    return at[:, None]


@triton.jit
def _over_heads(x):
    """[BLOCK_T, BLOCK_H, channels] -> [1, 1, channels]"""
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
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
    BATCHED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (i, group) takes every num_programs-th block of tokens of one group of heads, of q, of k or of v.

    Its share of the weight gradient goes to partial[i, group]; partial: [num_programs, q and k groups, D].
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
        w_first, w_second, w_rest = _load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
        dw_first = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_C), tl.float32)
        dw_second = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_C), tl.float32)
        dw_rest = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_REST), tl.float32)
        for block in tl.range(first_block, tl.cdiv(T, BLOCK_T), tl.num_programs(1), num_stages=STAGES):
            tokens = block * BLOCK_T + offset
            dy_at = _at_tokens(tokens, S, stride_b, stride_s, BATCHED) + heads * stride_h
            x_at, dx_at = (tokens * qkv_stride)[:, None] + columns, (tokens * ((HQ + 2 * HK) * D))[:, None] + columns
            more_first, more_second, more_rest = _norm_rotate_heads_backward(
                dy_ptr, qkv_ptr, dqkv_ptr, dy_at, x_at, dx_at, (tokens < T)[:, None] & is_head,
                table_ptr, positions_ptr, tokens, T, P, w_first, w_second, w_rest, eps,
                D, HALF, BLOCK_C, BLOCK_REST, PAIRS, AXES, S0, S1, S2, LAYOUT,
            )  # fmt: skip
            dw_first += more_first
            dw_second += more_second
            dw_rest += more_rest
        at = (first_block * (q_groups + k_groups) + group) * D + tl.zeros((1, 1), tl.int64)
        every = tl.full((1, 1), True, tl.int1)
        store_pair(partial_ptr, at, every, _over_heads(dw_first), _over_heads(dw_second), HALF, BLOCK_C, PAIRS)
        _store_rest(partial_ptr, at, every, _over_heads(dw_rest), 2 * HALF, D - 2 * HALF, BLOCK_REST)
    else:
        heads = ((group - q_groups - k_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        for block in range(first_block, tl.cdiv(T, BLOCK_T), tl.num_programs(1)):
            tokens = block * BLOCK_T + offset
            dy_at = _at_tokens(tokens, S, dv_stride_b, dv_stride_s, BATCHED) + heads * dv_stride_h
            dx_at = (tokens * ((HQ + 2 * HK) * D))[:, None] + (HQ + HK + heads) * D
            _copy_heads(dv_ptr, dqkv_ptr, dy_at, dx_at, (tokens < T)[:, None] & (heads < HK), D, BLOCK_D)


def forward(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    plus_one: bool,
    sections: Sequence[int] | None,
    layout: str,
    style: str,
    with_v: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    hq, hk = num_heads, num_kv_heads
    rows, dim = _rows(qkv), qkv.shape[-1] // (hq + 2 * hk)
    q, k = (qkv.new_empty(*qkv.shape[:-1], h, dim) for h in (hq, hk))
    v = torch.empty_like(k) if with_v else None
    if not rows.shape[0]:
        return q, k, v
    how: Values = {"eps": eps, "plus_one": plus_one, "sections": sections, "layout": layout, "style": style}
    _launch(rows, (q_weight, k_weight), (q, k, v), cos_sin, positions, None, hk, **how)
    return q, k, v


def write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    plus_one: bool,
    style: str,
) -> None:
    """`forward` into the paged cache."""
    if qkv.shape[0]:
        how: Values = {"eps": eps, "plus_one": plus_one, "sections": None, "layout": "chunked", "style": style}
        outputs = (q, k_cache, v_cache)
        _launch(_rows(qkv), (q_weight, k_weight), outputs, cos_sin, None, slots.contiguous(), num_kv_heads, **how)


def _launch(
    rows: Tensor,
    weights: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor | None],
    cos_sin: Tensor,
    positions: Tensor | None,
    slots: Tensor | None,
    num_kv_heads: int,
    *,
    eps: float,
    plus_one: bool,
    sections: Sequence[int] | None,
    layout: str,
    style: str,
) -> None:
    q, k, v = outputs
    heads = hq, hk = q.shape[-2], num_kv_heads
    dim = q.shape[-1]
    table, index = flat_table(cos_sin, positions)
    constants = _constants(
        hq, hk, dim, cos_sin.shape[-1], positions is not None, _tuple(sections), layout, style, plus_one
    )
    groups = sum(_groups(heads, constants["BLOCK_H"])[: 2 if v is None else 3])
    _qk_norm_rope_kernel[(ceil_div(rows.shape[0], constants["BLOCK_T"]) * groups,)](
        rows,
        *(weight.contiguous() for weight in weights),
        q,
        k,
        k if v is None else v,
        table,
        index,
        index if slots is None else slots,
        rows.shape[0],
        table.shape[0],
        rows.stride(0),
        q.stride(-3) if q.dim() == 3 else hq * dim,
        q.stride(-2),
        *((hk * dim, hk * dim, dim) if slots is None else k.stride()[:3]),
        eps,
        **constants,
        GROUPS=groups,
        CACHE_BLOCK=0 if slots is None else k.shape[1],
        **overlap(rows),
    )


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor | None,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    plus_one: bool,
    sections: Sequence[int] | None,
    layout: str,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    hq, hk = num_heads, num_kv_heads
    rows, dim = _rows(qkv), qkv.shape[-1] // (hq + 2 * hk)
    dq, dk, dv = _readable(dq), _readable(dk), None if dv is None else _readable(dv)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if dv is None:
        dqkv[..., (hq + hk) * dim :] = 0
    table, index = flat_table(cos_sin, positions)
    constants = _constants(
        hq, hk, dim, cos_sin.shape[-1], positions is not None, _tuple(sections), layout, style, plus_one
    )
    groups = _groups((hq, hk), constants["BLOCK_H"])
    num_groups = sum(groups[: 2 if dv is None else 3])
    waves = 16 * multiprocessors(qkv.device) // num_groups
    programs = max(1, min(ceil_div(rows.shape[0], constants["BLOCK_T"]), waves))
    partial = torch.empty(programs, groups[0] + groups[1], dim, dtype=torch.float32, device=qkv.device)
    some_dv = dk if dv is None else dv
    _qk_norm_rope_backward_kernel[(num_groups, programs)](
        dq,
        dk,
        some_dv,
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
        *token_strides(some_dv),
        rows.stride(0),
        eps,
        **constants,
        BATCHED=dq.dim() == 4,
        STAGES=STAGES,
    )
    dq_weight, dk_weight = partial[:, : groups[0]].sum((0, 1)), partial[:, groups[0] :].sum((0, 1))
    return dqkv, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype)


def _groups(heads: tuple[int, int], block_h: int) -> tuple[int, int, int]:
    """Programs for the heads of q, k and v of one token."""
    q_groups, k_groups = (ceil_div(h, block_h) for h in heads)
    return q_groups, k_groups, k_groups


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """[T, C] with unit stride along C: a view where strides allow one."""
    return _readable(x).reshape(-1, x.shape[-1])


def _tuple(sections: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sections is None else tuple(sections)


@functools.lru_cache(maxsize=1024)
def _constants(
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    has_positions: bool,
    sections: tuple[int, ...] | None,
    layout: str,
    style: str,
    plus_one: bool,
) -> dict[str, int]:
    channels = power_of_2(dim)
    # 1024 channels a program: one warp with four 16-byte reads a thread in flight. Two tokens share a weight.
    block_h = max(1, min(power_of_2(heads), 512 // channels))
    return {
        "HQ": heads,
        "HK": kv_heads,
        "D": dim,
        "BLOCK_T": max(1, 1024 // (block_h * channels)),
        "BLOCK_H": block_h,
        "BLOCK_REST": power_of_2(dim - rotary),
        "BLOCK_D": channels,
        "PAIRS": style == "pairs",
        "PLUS_ONE": plus_one,
        "num_warps": 1,
        **angle_constants(rotary, has_positions, sections, layout),
    }
