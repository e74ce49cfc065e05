# mypy: allow-untyped-defs
"""The arithmetic of attention by cuts of the keys, the same in every kernel that computes it.

Keys are cut at fixed multiples of their position. Each cut is computed from nothing, and cuts are folded first to last.
Products and sums of weights run on tensor cores, whose result for a row does not depend on the tile, and every FMA is
written out (kernels are compiled without fusion), so a query's bits depend on the keys that it sees alone: not on the
tile, nor on where the chunk of a prompt begins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear_triton import dot

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
Scales = tuple[Tensor | None, Tensor | None]  # of the codes of keys and values; a cache of plain numbers has none


def cut_of(dtype: torch.dtype) -> int:
    """Keys of one cut. fp32 has no tensor cores, and four times as many keys would not fit."""
    return 128 if dtype.itemsize == 2 else 32


@triton.jit
def load_keys(
    cache_ptr, scale_ptr, table_ptr, keys, end, head, stride_block, stride_offset, stride_head,
    BLOCK_SIZE: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """[keys, BLOCK_D] of one head; zero past `end`. Without a table keys lie one after the other.

    With scales, a plane [blocks, HK, BLOCK_SIZE], the cache holds codes: code * scale in fp32, rounded to DTYPE.
    """
    if table_ptr is None:
        at = cache_ptr + keys.to(tl.int64) * stride_offset + head * stride_head
    else:
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
        at = cache_ptr + block * stride_block + (keys % BLOCK_SIZE) * stride_offset + head * stride_head
    channels = tl.arange(0, BLOCK_D)[None, :]
    found = tl.load(at[:, None] + channels, mask=(keys < end)[:, None] & (channels < D), other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + (block * HK + head) * BLOCK_SIZE + keys % BLOCK_SIZE, mask=keys < end, other=0.0)
        found = _number(found)
        found = settled((found * tl.broadcast_to(scale[:, None], found.shape)).to(DTYPE), WIDEN)
    return found


@triton.jit
def _number(code):
    """A code in fp32. Of integers by a sum: 1.5 * 2^23 leaves no room for a fraction, and conversions are slow."""
    if code.dtype.is_int8():
        return (code.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return code.to(tl.float32)


@triton.jit
def settled(x, WIDEN: tl.constexpr):
    """x, as 16 bits that lie as loaded ones do.

    Else the compiler converts codes where the tensor cores want them, deals the channels of a product out among threads
    by the width of a code, and reads the codes of values byte by byte.
    """
    if WIDEN or x.dtype == tl.float32:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def load_cut(
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, keys, end, head, k_stride_block, k_stride_offset,
    k_stride_head, v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The keys and their values, in the dtype of the queries."""
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
def cut(q, k, v, visible, scale, WIDEN: tl.constexpr):
    """One cut from nothing: its highest score, the sum of its weights, and the values so weighted."""
    top, weights = weigh(q, k, visible, scale, WIDEN)
    total, out = weighted(weights, v, WIDEN)
    return top, total, out


@triton.jit
def weigh(q, k, visible, scale, WIDEN: tl.constexpr):
    """The highest score of a cut, and its weights: powers of two of scores relative to the highest.

    visible: None where all keys are; a row without any has a highest score of -inf and weights of zero.
    """
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), WIDEN)
    return weights_of(scores, visible, scale)


@triton.jit
def weights_of(scores, visible, scale):
    """`weigh` of scores that are there."""
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1) * scale
    shift = tl.where(top == float("-inf"), 0.0, -top)
    return top, tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), _across(shift, scores)))


@triton.jit
def weighted(weights, v, WIDEN: tl.constexpr):
    """The sum of a cut's weights, and the values so weighted; rounded to the dtype of v before they are summed."""
    weights = weights.to(v.dtype)
    return total_of(weights, WIDEN), dot(weights, v, tl.zeros((weights.shape[0], v.shape[1]), tl.float32), WIDEN)


@triton.jit
def total_of(weights, WIDEN: tl.constexpr):
    """The sum of rounded weights, by a product with ones."""
    ones = tl.full((weights.shape[1], 16), 1.0, weights.dtype)
    return tl.max(dot(weights, ones, tl.zeros((weights.shape[0], 16), tl.float32), WIDEN), 1)


@triton.jit
def fold(top, total, out, cut_top, cut_total, cut_out):
    """What cuts before have given, and one more. A cut without visible keys changes no bit."""
    new, keep, add = shares(top, cut_top)
    return new, tl.fma(cut_total, add, total * keep), added(out, cut_out, keep, add)


@triton.jit
def shares(top, cut_top):
    """The highest score with one more cut, and by what what was there and what comes are multiplied."""
    new = tl.maximum(top, cut_top)
    shift = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2(top - shift), tl.exp2(cut_top - shift)


@triton.jit
def added(out, cut_out, keep, add):
    return tl.fma(cut_out, _across(add, cut_out), out * _across(keep, out))


@triton.jit
def add_mass(mass, weights, top, cut_top):
    """The sum of all weights before they are rounded: of lse, which has more digits than weights of 16 bits."""
    new = tl.maximum(top, cut_top)
    shift = tl.where(new == float("-inf"), 0.0, new)
    return tl.fma(tl.sum(weights, 1), tl.exp2(cut_top - shift), mass * tl.exp2(top - shift))


@triton.jit
def _across(x, like):
    """A number a row, in the shape of a matrix."""
    return tl.broadcast_to(x[:, None], like.shape)
