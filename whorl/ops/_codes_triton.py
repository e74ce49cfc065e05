# mypy: allow-untyped-defs
"""The arithmetic of codes in registers: of `dynamic_quant` on one row, and of 4-bit codes.

Gluon kernels wrap these functions, `gluon.jit(function.fn)`, as Gluon does with functions of Triton itself.
"""

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


@triton.jit
def pairs_bf16(words, zeros, scales):
    """Return the eight values of each word of 4-bit codes, in the order of pairs of quantised/layout.py.

    zeros: the bf16 bits of 128 + zero, in both halves of a word; scales: their bf16 bits, likewise. A nibble or-ed
    into 0x4300 is the bf16 128 + code; the difference is exact, and the product is rounded once.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        shr.u32 b, $8, 4;
        shr.u32 c, $8, 8;
        shr.u32 d, $8, 12;
        lop3.b32 a, $8, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
        sub.rn.bf16x2 a, a, $9;
        sub.rn.bf16x2 b, b, $9;
        sub.rn.bf16x2 c, c, $9;
        sub.rn.bf16x2 d, d, $9;
        mul.rn.bf16x2 a, a, $10;
        mul.rn.bf16x2 b, b, $10;
        mul.rn.bf16x2 c, c, $10;
        mul.rn.bf16x2 d, d, $10;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [words, zeros, scales],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pairs_e2m1(words, factors):
    """Return the eight values of each word of codes of e2m1, in the order of pairs of quantised/layout.py.

    factors: the bf16 bits of 2^126 times the scale, in both halves of a word. A code's sign and its other three bits,
    as the lowest bits of an exponent and the highest of a mantissa, are the bf16 number 2^126 times smaller, of which
    0.5 is a denormal number. The product is exact.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, t;
        shl.b32 t, $8, 6;
        and.b32 t, t, 0x01C001C0;
        shl.b32 a, $8, 12;
        lop3.b32 a, a, 0x80008000, t, 0xEA;
        shl.b32 t, $8, 2;
        and.b32 t, t, 0x01C001C0;
        shl.b32 b, $8, 8;
        lop3.b32 b, b, 0x80008000, t, 0xEA;
        shr.u32 t, $8, 2;
        and.b32 t, t, 0x01C001C0;
        shl.b32 c, $8, 4;
        lop3.b32 c, c, 0x80008000, t, 0xEA;
        shr.u32 t, $8, 6;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 d, $8, 0x80008000, t, 0xEA;
        mul.rn.bf16x2 a, a, $9;
        mul.rn.bf16x2 b, b, $9;
        mul.rn.bf16x2 c, c, $9;
        mul.rn.bf16x2 d, d, $9;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, factors],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def duplicate_halves(bits):
    """Copy 16 bits to both halves of a 32-bit word."""
    bits = bits.to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def opaque(x, WIDEN: tl.constexpr):
    """Return 16-bit x unchanged, behind an instruction that the compiler cannot look through.

    Otherwise the compiler converts codes in the tensor cores' layout, distributes the columns of a product over
    threads by the width of a code, and loads codes byte by byte. For a warp's instructions (mma.sync) that permutes the
    columns: one instruction adds every other pair of 32 columns, not 16 columns next to each other, and the bits are
    not those of plain weights, nor of a warpgroup's instructions.
    """
    if WIDEN or x.dtype == tl.float32:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
