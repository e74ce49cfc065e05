# mypy: allow-untyped-defs
"""Bidirectional attention of packed segments in Triton: a program takes a tile of one segment's queries, and one head.

Keys are cut at fixed multiples of their place in the segment, and cuts are added from first to last. Products run on
tensor cores, whose result for a row does not depend on the tile, and every FMA is written out (kernels are compiled
without FMA fusion). A query's bits therefore depend on its segment alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._hopper import gluon_reason
from .._launch_triton import launched
from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from ..sparse_attention import masked_triton
from .cuts_triton import LOG2_E, cut_of, load_keys
from .packed import Gradients, read
from .segment_gradients import by_segment

_HOPPER_QUERIES = 128
_HOPPER_DIMS = (64, 72, 80, 128)


@triton.jit
def _load(ptr, keys, length, head, stride_t, stride_h, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load keys or values that lie one after the other, without a block table or scales."""
    return load_keys(
        ptr, None, None, keys, length, head, 0, stride_t, stride_h, 1, 1, D, BLOCK_D, ptr.dtype.element_ty, False
    )


@launched
@triton.jit
def _bidirectional_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    y_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    scale,
    B,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    CUT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of QUERIES. Strides are in units of UNIT channels: where the compiler knows a factor, it loads wider."""
    q_stride_t, q_stride_h = q_stride_t * UNIT, q_stride_h * UNIT
    k_stride_t, k_stride_h = k_stride_t * UNIT, k_stride_h * UNIT
    v_stride_t, v_stride_h = v_stride_t * UNIT, v_stride_h * UNIT
    tile, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, BLOCK_B)
    starts = tl.load(starts_ptr + index, mask=index < B, other=0)
    ends = tl.load(starts_ptr + 1 + index, mask=index < B, other=0)
    tiles = tl.cdiv(ends - starts, QUERIES)
    until = tl.cumsum(tiles, 0)
    b = tl.sum(((until <= tile) & (index < B)).to(tl.int32), 0)
    if b < B:
        query = (tile - tl.sum(tl.where(index < b, tiles, 0), 0)) * QUERIES + tl.arange(0, QUERIES)
        start = tl.load(starts_ptr + b)
        length = tl.load(starts_ptr + b + 1) - start
        token = (start + query).to(tl.int64)
        channels = tl.arange(0, BLOCK_D)
        mask = (query < length)[:, None] & (channels < D)[None, :]
        q = tl.load(q_ptr + token[:, None] * q_stride_t + head * q_stride_h + channels[None, :], mask=mask, other=0.0)
        k_ptr += start.to(tl.int64) * k_stride_t
        v_ptr += start.to(tl.int64) * v_stride_t
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES, 16), tl.float32)
        out = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        for at in range(0, length, CUT):
            keys = at + tl.arange(0, CUT)
            k = _load(k_ptr, keys, length, head, k_stride_t, k_stride_h, D, BLOCK_D)
            v = _load(v_ptr, keys, length, head, v_stride_t, v_stride_h, D, BLOCK_D)
            scores = dot(q, tl.trans(k), tl.zeros((QUERIES, CUT), tl.float32), WIDEN)
            scores = tl.where((keys < length)[None, :], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1) * scale)
            shift = tl.broadcast_to(-new[:, None], scores.shape)
            weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), shift)).to(v.dtype)
            keep = tl.exp2(top - new)[:, None]
            # The sum of weights uses the rounded weights, as the product with the values does.
            total = dot(weights, tl.full((CUT, 16), 1.0, v.dtype), total * keep, WIDEN)
            out = dot(weights, v, out * keep, WIDEN)
            top = new
        y = tl.div_rn(out, tl.broadcast_to(tl.max(total, 1)[:, None], out.shape))
        y_at = y_ptr + (token[:, None] * H + head) * D + channels[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # tokens of no segment stay zero
    count = len(starts) - 1
    if not y.numel() or not count:
        return y
    q, k, v = (unit_stride(x) for x in (q, k, v))
    tokens, heads, dim = q.shape
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    shapes = {"H": heads, "D": dim, "BLOCK_B": power_of_2(count), "enable_fp_fusion": False}
    inputs = (q, k, v, starts.contiguous())
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    numbers = (*(stride // unit for stride in strides), scale * LOG2_E, count)
    if hopper_reason(q, k, v) is None:
        from .bidirectional_gluon_triton import REGISTERS, STAGES, _bidirectional_gluon_kernel

        ones, main = torch.ones(8, dtype=q.dtype, device=q.device), 128 if dim == 128 else 64
        sizes = {"MAIN": main, "WIDTH": 32 if dim == 80 else 16, "STAGES": STAGES[main], "REGISTERS": REGISTERS[main]}
        _bidirectional_gluon_kernel[(heads, ceil_div(tokens, _HOPPER_QUERIES) + count)](
            *inputs, ones, y, *numbers, **sizes, num_warps=4, **shapes
        )
        return y
    is_narrow, is_wide = q.element_size() == 2, dim > 128
    queries = 16 if is_interpreting() else 128 if is_narrow and not is_wide else 32
    _bidirectional_kernel[(ceil_div(tokens, queries) + count, heads)](
        *inputs,
        y,
        *numbers,
        BLOCK_D=max(16, power_of_2(dim)),
        QUERIES=queries,
        CUT=cut_of(q.dtype),
        UNIT=unit,
        WIDEN=is_interpreting(),
        num_warps=8 if queries > 32 else 4,
        num_stages=1 if is_wide else 2,
        **shapes,
    )
    return y


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Gradients:
    return by_segment(masked_triton.forward, masked_triton.backward, dout, q, k, v, read(starts, len(q)), scale)


def hopper_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return None where the Hopper kernel takes these, else the reason that the plain kernel runs."""
    if q.shape[2] not in _HOPPER_DIMS or q.element_size() != 2:
        return f"takes {', '.join(map(str, _HOPPER_DIMS))} channels of 16 bits, got {q.shape[2]} of {q.dtype}"
    for x in (q, k, v):
        if x.stride(0) % 8 or x.stride(1) % 8 or (not x.is_meta and x.data_ptr() % 16):
            return "copies 16 bytes at a time, but rows are not aligned to 16 bytes"
    return gluon_reason(q.device)
