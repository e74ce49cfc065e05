# mypy: allow-untyped-defs
"""What `dynamic_quant` does to a row, for kernels that quantise what they have in registers."""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """Of fp32, as integers: in the same order as floats, and NaN is the largest instead of being lost."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """largest: the largest `magnitude` of each row; LARGEST: that of a code."""
    return tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit
def codes_of(x, scale, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """x over scale, in the range of a code and, of integers, rounded; in fp32. scale: broadcasts to x."""
    is_usable = (scale > 0) & (scale < float("inf"))
    divisor = tl.where(is_usable, scale, 1.0)
    codes = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    codes = tl.minimum(tl.maximum(tl.where(is_usable, codes, 0.0), -LARGEST), LARGEST)
    if IS_INTEGER:
        codes = _round_to_even(codes)
    return codes


@triton.jit
def _round_to_even(x):
    """To nearest, ties to even, for magnitudes below 2^22: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0
