# mypy: allow-untyped-defs
"""The arithmetic of `dynamic_quant` on one row, for kernels that quantise values they hold in registers."""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| (fp32) as int32. They are ordered as the floats are, with NaN above infinity.

    A maximum of them is therefore NaN where a number is NaN; a maximum of floats may drop it.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest, LARGEST: tl.constexpr):
    """Return the scale of each row in fp32: its largest magnitude divided by LARGEST, the largest code.

    largest: the magnitudes as `magnitude_bits`.
    """
    return tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit
def to_codes(x, scale, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """Return x / scale in fp32, clamped to the range of a code and, for integer codes, rounded to nearest even.

    scale broadcasts to x; where it is 0, infinite or NaN the codes are 0.
    """
    is_usable = (scale > 0) & (scale < float("inf"))
    divisor = tl.where(is_usable, scale, 1.0)
    codes = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    codes = tl.minimum(tl.maximum(tl.where(is_usable, codes, 0.0), -LARGEST), LARGEST)
    if IS_INTEGER:
        codes = _round_to_even(codes)
    return codes


@triton.jit
def _round_to_even(x):
    """Round to nearest, ties to even, for magnitudes below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0
