# mypy: allow-untyped-defs
"""Norm, rotation and unpacking of a qkv projection in one pass.

A head's channels stay in registers between the norm and the rotation. The first R channels of a head rotate; the
others are called the tail.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._codes_triton import magnitude_bits, row_scale, to_codes
from .._formats import code_constants
from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, flat_rows, power_of_2
from .._sums_triton import row_sum
from ..rope.triton import angle_constants, flat_table, load_angles, load_pair, rotated, store_pair
from .cuts_triton import Scales


@triton.jit
def load_tail(x_ptr, at, mask, REST_START: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Load channels REST_START to REST_START + REST of the heads at `at` [BLOCK_T, BLOCK_H], in fp32."""
    channels = REST_START + tl.arange(0, BLOCK_REST)
    inside = mask[:, :, None] & (channels < REST_START + REST)
    return tl.load(x_ptr + at[:, :, None] + channels, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tail(y_ptr, at, mask, tail, REST_START: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Store channels REST_START to REST_START + REST of the heads at `at` [BLOCK_T, BLOCK_H]."""
    channels = REST_START + tl.arange(0, BLOCK_REST)
    inside = mask[:, :, None] & (channels < REST_START + REST)
    tl.store(y_ptr + at[:, :, None] + channels, tail.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_weight(
    weight_ptr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Load a norm's weight (PLUS_ONE: plus 1) as first and second channels of pairs, and its tail, [1, 1, ..] each."""
    at = tl.zeros((1, 1), tl.int64)
    mask = tl.full((1, 1), True, tl.int1)
    first, second = load_pair(weight_ptr, at, mask, HALF, BLOCK_C, PAIRS)
    tail = load_tail(weight_ptr, at, mask, 2 * HALF, REST, BLOCK_REST)
    if PLUS_ONE:
        first += 1.0
        second += 1.0
        tail += 1.0
    return first, second, tail


@triton.jit
def copy_heads(x_ptr, y_ptr, x_at, y_at, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy the heads at x_at to y_at, all D channels."""
    store_tail(y_ptr, y_at, mask, load_tail(x_ptr, x_at, mask, 0, D, BLOCK_D), 0, D, BLOCK_D)


@triton.jit
def copy_codes(
    x_ptr, y_ptr, scale_ptr, x_at, y_at, scale_at, mask, D: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
):  # fmt: skip
    """Quantise the heads at x_at, as `dynamic_quant` does; store codes at y_at and scales at scale_at."""
    x = load_tail(x_ptr, x_at, mask, 0, D, BLOCK_D)
    scale = row_scale(tl.max(magnitude_bits(x), 2), LARGEST)
    store_tail(y_ptr, y_at, mask, to_codes(x, scale[:, :, None], LARGEST, IS_INTEGER), 0, D, BLOCK_D)
    tl.store(scale_ptr + scale_at, scale, mask=mask)


@triton.jit
def inverse_rms(total, D: tl.constexpr, eps):
    """Return 1 / rms, correctly rounded, from sums of squares [tokens, heads].

    There is one per head, and the error of the fast reciprocal root would dominate the fp32 error.
    """
    return tl.div_rn(1.0, tl.sqrt_rn(total / D + eps))[:, :, None]


@triton.jit
def _head_sum(x, LENGTH: tl.constexpr):
    """Return the sums [tokens, heads] along the last dim of x [tokens, heads, LENGTH], in the order of `row_sum`."""
    rows: tl.constexpr = x.shape[0] * x.shape[1]
    return tl.reshape(row_sum(tl.reshape(x, (rows, LENGTH)), rows, LENGTH), (x.shape[0], x.shape[1]))


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
    scale_ptr,
    scale_at,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAIRS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise, rotate and store the heads at x_at.

    With scale_ptr they are stored as codes; what is quantised is rounded to the dtype of x first.
    """
    if OVERLAP == 2:
        w_first, w_second, w_tail = load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
        cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, HAS_POSITIONS, False)
        follow(OVERLAP)
        first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
    else:
        # Heads are loaded first: a warp issues in order, and a table row must wait for its position.
        first, second = load_pair(x_ptr, x_at, mask, HALF, BLOCK_C, PAIRS)
        w_first, w_second, w_tail = load_weight(weight_ptr, HALF, BLOCK_C, PAIRS, D - 2 * HALF, BLOCK_REST, PLUS_ONE)
        cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, HAS_POSITIONS, False)
    total = _head_sum(tl.fma(first, first, second * second), BLOCK_C)
    if D > 2 * HALF:
        tail = load_tail(x_ptr, x_at, mask, 2 * HALF, D - 2 * HALF, BLOCK_REST)
        total += _head_sum(tail * tail, BLOCK_REST)
    inverse = inverse_rms(total, D, eps)
    first, second = first * inverse * w_first, second * inverse * w_second
    rotated_first, rotated_second = rotated(first, second, cos, sin)
    if D > 2 * HALF:
        tail = tail * inverse * w_tail
    if scale_ptr is not None:
        dtype = x_ptr.dtype.element_ty
        rotated_first = rotated_first.to(dtype).to(tl.float32)
        rotated_second = rotated_second.to(dtype).to(tl.float32)
        largest = tl.max(tl.maximum(magnitude_bits(rotated_first), magnitude_bits(rotated_second)), 2)
        if D > 2 * HALF:
            tail = tail.to(dtype).to(tl.float32)
            largest = tl.maximum(largest, tl.max(magnitude_bits(tail), 2))
        scale = row_scale(largest, LARGEST)
        tl.store(scale_ptr + scale_at, scale, mask=mask)
        scale = scale[:, :, None]
        rotated_first = to_codes(rotated_first, scale, LARGEST, IS_INTEGER)
        rotated_second = to_codes(rotated_second, scale, LARGEST, IS_INTEGER)
        if D > 2 * HALF:
            tail = to_codes(tail, scale, LARGEST, IS_INTEGER)
    store_pair(y_ptr, y_at, mask, rotated_first, rotated_second, HALF, BLOCK_C, PAIRS)
    if D > 2 * HALF:
        store_tail(y_ptr, y_at, mask, tail, 2 * HALF, D - 2 * HALF, BLOCK_REST)


@triton.jit
def _places(slots_ptr, tokens, is_token, width: tl.constexpr, block_stride, offset_stride, CACHE_BLOCK: tl.constexpr):
    """Return the offsets at which keys or values of these tokens are stored, [BLOCK_T, 1], and which are stored.

    CACHE_BLOCK: tokens per block of the cache; 0 where the output is contiguous, with `width` numbers per token.
    """
    if CACHE_BLOCK == 0:
        places = (tokens * width)[:, None]
    else:
        slots = tl.load(slots_ptr + tokens[:, None], mask=is_token, other=-1).to(tl.int64)
        places = slots // CACHE_BLOCK * block_stride + slots % CACHE_BLOCK * offset_stride
        is_token = is_token & (slots >= 0)
    return places, is_token


@triton.jit
def _scale_places(slots_ptr, tokens, is_token, heads, HK: tl.constexpr, CACHE_BLOCK: tl.constexpr):
    """Return the offsets of the scales of these tokens and heads, [BLOCK_T, BLOCK_H], in [blocks, HK, CACHE_BLOCK]."""
    slots = tl.load(slots_ptr + tokens[:, None], mask=is_token, other=0).to(tl.int64)
    return (slots // CACHE_BLOCK * HK + heads) * CACHE_BLOCK + slots % CACHE_BLOCK


@launched
@triton.jit(do_not_specialize_on_alignment=["T", "P"])
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
    k_scale_ptr,
    v_scale_ptr,
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
    HAS_POSITIONS: tl.constexpr,
    GROUPS: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes a group of BLOCK_H heads, of q, of k or of v, of BLOCK_T tokens; GROUPS includes v or not.

    k and v are stored to contiguous tensors or, with CACHE_BLOCK tokens per block, to the paged cache; with scales, as
    codes.
    """
    begin(OVERLAP)
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
            T, P, eps, None, None, D, HALF, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE, HAS_POSITIONS, LARGEST,
            IS_INTEGER, OVERLAP,
        )  # fmt: skip
    elif group < q_groups + k_groups:
        heads = ((group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        y_token, is_token = _places(
            slots_ptr, tokens, is_token, HK * D, block_stride, offset_stride, CACHE_BLOCK
        )  # fmt: skip
        x_at, y_at = x_token + (HQ + heads) * D, y_token + heads * head_stride
        scale_at = None
        if k_scale_ptr is not None:
            scale_at = _scale_places(slots_ptr, tokens, is_token, heads, HK, CACHE_BLOCK)
        _norm_rotate_heads(
            qkv_ptr, k_ptr, k_weight_ptr, x_at, y_at, is_token & (heads < HK), table_ptr, positions_ptr, tokens,
            T, P, eps, k_scale_ptr, scale_at, D, HALF, BLOCK_C, BLOCK_REST, PAIRS, PLUS_ONE, HAS_POSITIONS,
            LARGEST, IS_INTEGER, OVERLAP,
        )  # fmt: skip
    else:
        heads = ((group - q_groups - k_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        y_token, is_token = _places(
            slots_ptr, tokens, is_token, HK * D, block_stride, offset_stride, CACHE_BLOCK
        )  # fmt: skip
        x_at, y_at = x_token + (HQ + HK + heads) * D, y_token + heads * head_stride
        follow(OVERLAP)
        if v_scale_ptr is None:
            copy_heads(qkv_ptr, v_ptr, x_at, y_at, is_token & (heads < HK), D, BLOCK_D)
        else:
            scale_at = _scale_places(slots_ptr, tokens, is_token, heads, HK, CACHE_BLOCK)
            copy_codes(
                qkv_ptr, v_ptr, v_scale_ptr, x_at, y_at, scale_at, is_token & (heads < HK), D, BLOCK_D, LARGEST,
                IS_INTEGER,
            )  # fmt: skip


def forward(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    with_v: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    hq, hk = num_heads, num_kv_heads
    rows, dim = flat_rows(qkv), qkv.shape[-1] // (hq + 2 * hk)
    q, k = (qkv.new_empty(*qkv.shape[:-1], h, dim) for h in (hq, hk))
    v = torch.empty_like(k) if with_v else None
    if not rows.shape[0]:
        return q, k, v
    weights = (options.pop("q_weight"), options.pop("k_weight"))
    _launch(rows, weights, (q, k, v), cos_sin, positions, None, (None, None), hk, **options)
    return q, k, v


def write(qkv: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **options: Any) -> None:
    """Compute `qk_norm_rope_write`: as `forward`, but k and v are written into the paged cache."""
    if qkv.shape[0]:
        weights, cos_sin = (options.pop("q_weight"), options.pop("k_weight")), options.pop("cos_sin")
        heads = options.pop("num_heads"), options.pop("num_kv_heads")
        outputs, scales = (q, k_cache, v_cache), (options.pop("k_scale"), options.pop("v_scale"))
        _launch(flat_rows(qkv), weights, outputs, cos_sin, None, slots.contiguous(), scales, heads[1], **options)


def _launch(
    rows: Tensor,
    weights: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor | None],
    cos_sin: Tensor,
    positions: Tensor | None,
    slots: Tensor | None,
    scales: Scales,
    num_kv_heads: int,
    *,
    eps: float,
    plus_one: bool,
    style: str,
) -> None:
    q, k, v = outputs
    heads = hq, hk = q.shape[-2], num_kv_heads
    dim = q.shape[-1]
    table, index = flat_table(cos_sin, positions)
    constants = launch_constants(hq, hk, dim, cos_sin.shape[-1], positions is not None, style, plus_one)
    groups = sum(head_groups(heads, constants["BLOCK_H"])[: 2 if v is None else 3])
    _qk_norm_rope_kernel[(ceil_div(rows.shape[0], constants["BLOCK_T"]) * groups,)](
        rows,
        *(weight.contiguous() for weight in weights),
        q,
        k,
        k if v is None else v,
        table,
        index,
        index if slots is None else slots,
        *scales,
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
        **({"LARGEST": 0.0, "IS_INTEGER": False} if scales[0] is None else code_constants(k)),
        enable_fp_fusion=False,
        **overlap(rows),
    )


def head_groups(heads: tuple[int, int], block_h: int) -> tuple[int, int, int]:
    """Return how many programs take the heads of q, of k and of v of one block of tokens. heads: of q and of k."""
    q_groups, k_groups = (ceil_div(h, block_h) for h in heads)
    return q_groups, k_groups, k_groups


@functools.lru_cache(maxsize=1024)
def launch_constants(
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    has_positions: bool,
    style: str,
    plus_one: bool,
) -> dict[str, int]:
    """Return the constants of the forward and backward kernels by name."""
    channels = power_of_2(dim)
    # 1024 channels per program: one warp, with four 16-byte loads per thread in flight. Two tokens share a weight.
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
        **angle_constants(rotary, has_positions),
    }
