# mypy: allow-untyped-defs
"""The arithmetic of attention by cuts of the keys, shared by every kernel that computes it.

A cut is a block of `cut_of` keys that begins at a position that is a multiple of that number. The softmax of each cut
is computed by itself (`attention_weights`, `sum_values`), and the cuts are combined from first to last (`fold`).
Products and sums of weights run on tensor cores, whose result for a row does not depend on the tile, and every FMA is
written out (kernels are compiled without FMA fusion). A query's bits therefore depend on the keys that it attends to
alone, not on the tile nor on where a chunk of the prompt begins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._codes_triton import opaque
from ..linear_triton import dot
from .tiles import SMALL, TANH

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
LOG2 = tl.constexpr(LOG2_E)
_T0, _T1, _T2, _T3, _T4 = map(tl.constexpr, TANH)
_SMALL = tl.constexpr(SMALL)
Scales = tuple[Tensor | None, Tensor | None]  # of quantised keys and values; None for a cache of plain numbers


def cut_of(dtype: torch.dtype) -> int:
    """Return the number of keys of a cut: in fp32, which does not run on tensor cores, 128 keys would not fit."""
    return 128 if dtype.itemsize == 2 else 32


@triton.jit
def load_keys(
    cache_ptr, scale_ptr, table_ptr, keys, end, head, stride_block, stride_offset, stride_head,
    BLOCK_SIZE: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Load keys or values [keys, BLOCK_D] of one head; zero past `end`. Without a table they lie one after the other.

    With scales [blocks, HK, BLOCK_SIZE] the cache holds codes: the result is code * scale in fp32, rounded to DTYPE.
    """
    if table_ptr is None:
        at = cache_ptr + keys.to(tl.int64) * stride_offset + head * stride_head
    else:
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
        at = cache_ptr + block * stride_block + (keys % BLOCK_SIZE) * stride_offset + head * stride_head
    channels = tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(at[:, None] + channels, mask=(keys < end)[:, None] & (channels < D), other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + (block * HK + head) * BLOCK_SIZE + keys % BLOCK_SIZE, mask=keys < end, other=0.0)
        x = _number(x)
        x = opaque((x * tl.broadcast_to(scale[:, None], x.shape)).to(DTYPE), WIDEN)
    return x


@triton.jit
def _number(code):
    """Return codes as numbers in fp32.

    int8 is added to the bits of 1.5 * 2^23, which is then subtracted, since conversion instructions are slow.
    """
    if code.dtype.is_int8():
        return (code.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return code.to(tl.float32)


@triton.jit
def load_cut(
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, keys, end, head, k_stride_block, k_stride_offset,
    k_stride_head, v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Load the keys and the values of a cut, in the dtype of the queries."""
    k = load_keys(
        k_cache_ptr, k_scale_ptr, table_ptr, keys, end, head, k_stride_block, k_stride_offset, k_stride_head,
        BLOCK_SIZE, HK, D, BLOCK_D, DTYPE, WIDEN,
    )  # fmt: skip
    v = load_keys(
        v_cache_ptr, v_scale_ptr, table_ptr, keys, end, head, v_stride_block, v_stride_offset, v_stride_head,
        BLOCK_SIZE, HK, D, BLOCK_D, DTYPE, WIDEN,
    )  # fmt: skip
    return k, v


@triton.jit
def cut(q, k, v, visible, scale, softcap, CAPPED: tl.constexpr, WIDEN: tl.constexpr):
    """Compute one cut by itself: its highest score, the sum of its weights, and the weighted sum of its values."""
    top, weights = attention_weights(q, k, visible, scale, softcap, CAPPED, WIDEN)
    total, out = sum_values(weights, v, WIDEN)
    return top, total, out


@triton.jit
def attention_weights(q, k, visible, scale, softcap, CAPPED: tl.constexpr, WIDEN: tl.constexpr):
    """Return the highest score of a cut, times scale, and its weights: exp2 of the scaled scores relative to it.

    visible: the mask; None where no key is masked; scale: includes log2(e). A row without visible keys has a highest
    score of -inf and weights of zero. CAPPED: a scaled score s is replaced by softcap * tanh(s / softcap).
    """
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), WIDEN)
    if CAPPED:
        scores, scale = tanh(scores * (scale * LN_2 / softcap)), softcap * LOG2
    return exp_scores(scores, visible, scale)


@triton.jit
def exp_scores(scores, visible, scale):
    """Compute what `attention_weights` returns from scores q k^T that are already computed."""
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1) * scale
    shift = tl.where(top == float("-inf"), 0.0, -top)
    return top, tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), _across(shift, scores)))


@triton.jit
def tanh(x):
    """Compute what `tanh` of tiles.py does."""
    square = x * x
    factor = (((_T0 * square + _T1) * square + _T2) * square + _T3) * square + _T4
    large = 1 - 2 / (1 + tl.exp2(tl.abs(x) * (2 * LOG2)))
    return tl.where(tl.abs(x) < _SMALL, x + x * square * factor, tl.where(x < 0, -large, large))


@triton.jit
def sum_values(weights, v, WIDEN: tl.constexpr):
    """Return the sum of a cut's weights, and the weighted sum of its values; weights are rounded to v's dtype first."""
    weights = weights.to(v.dtype)
    return total_of(weights, WIDEN), dot(weights, v, tl.zeros((weights.shape[0], v.shape[1]), tl.float32), WIDEN)


@triton.jit
def total_of(weights, WIDEN: tl.constexpr):
    """Return the sum of rounded weights of each row, by a product with ones on the tensor cores."""
    ones = tl.full((weights.shape[1], 16), 1.0, weights.dtype)
    return tl.max(dot(weights, ones, tl.zeros((weights.shape[0], 16), tl.float32), WIDEN), 1)


@triton.jit
def start_fold(sinks_ptr, heads, mask):
    """Return the highest score and the sum of weights before the first cut: those of the heads' sinks, if they have
    any. The weighted values are zero."""
    zero = heads.to(tl.float32) * 0.0
    if sinks_ptr is None:
        top, total = zero - float("inf"), zero
    else:
        top, total = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * LOG2, zero + 1.0
    return top, total


@triton.jit
def fold(top, total, out, cut_top, cut_total, cut_out):
    """Return the highest score, sum of weights and weighted values of the cuts so far, combined with one more cut.

    A cut without visible keys changes no bit.
    """
    new, keep, add = rescale_factors(top, cut_top)
    return new, tl.fma(cut_total, add, total * keep), add_rescaled(out, cut_out, keep, add)


@triton.jit
def rescale_factors(top, cut_top):
    """Return the highest score with one more cut, and the factors of the sums so far and of the sums of that cut."""
    new = tl.maximum(top, cut_top)
    shift = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2(top - shift), tl.exp2(cut_top - shift)


@triton.jit
def add_rescaled(out, cut_out, keep, add):
    """Return the weighted values combined with those of one more cut; keep, add: the factors of `rescale_factors`."""
    return tl.fma(cut_out, _across(add, cut_out), out * _across(keep, out))


@triton.jit
def add_mass(mass, weights, top, cut_top):
    """Return the sum of all weights with one more cut, before they are rounded.

    It is for lse, which needs more digits than 16-bit weights have; top, cut_top: the highest scores before and in it.
    """
    new = tl.maximum(top, cut_top)
    shift = tl.where(new == float("-inf"), 0.0, new)
    return tl.fma(tl.sum(weights, 1), tl.exp2(cut_top - shift), mass * tl.exp2(top - shift))


@triton.jit
def _across(x, like):
    """Broadcast one number per row to the shape of a matrix."""
    return tl.broadcast_to(x[:, None], like.shape)
