# mypy: allow-untyped-defs
"""Matmuls with packed weights in Triton. The weight is the left operand of the tensor cores, tokens are the columns.

Codes are loaded into registers, become values there, and are multiplied from there: passing the values through shared
memory would cost more than reading the codes. Whatever the number of tokens, K is accumulated upwards, 16 columns at a
time, in chunks of 1024 that start from zero and are added in order. fp32 has no tensor cores: columns are added one by
one, in chains that start from zero and are added in order, which gives a chunk's sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._codes_triton import duplicate_halves, pairs_bf16
from ..linear_triton import dot
from .layout import CHUNK, Weight

RUN = 32  # a word of 4-bit codes holds columns from within a run of this length


@triton.jit
def pairs_plain(words):
    """Return the eight codes of each word, in the order of pairs."""
    return (
        words & 15,
        (words >> 16) & 15,
        (words >> 4) & 15,
        (words >> 20) & 15,
        (words >> 8) & 15,
        (words >> 24) & 15,
        (words >> 12) & 15,
        (words >> 28) & 15,
    )


@triton.jit
def order_int4_columns(a, b, c, d, e, f, g, h, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rearrange the eight values of each word to [ROWS, BLOCK_K] in column order.

    Each thread already holds the values that the tensor cores need from it, so no data moves between threads.
    """
    low, high = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    # Axes i, w, second, p % 2 and p // 2, as in layout.py.
    parts = tl.reshape(tl.join(low, high), (ROWS, BLOCK_K // 128, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 6, 5, 2, 4)), (ROWS, BLOCK_K))


@triton.jit
def _order_byte_columns(codes, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rearrange tiled bytes to [ROWS, BLOCK_K] in column order, likewise without moving data between threads."""
    parts = tl.reshape(codes, (ROWS, BLOCK_K // 64, 4, 8, 2))  # i, p, second, as in layout.py
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), (ROWS, BLOCK_K))


@triton.jit
def _load_groups(ptr, start, k, K, GROUP: tl.constexpr, IS_ONE: tl.constexpr):
    """Load the scales or zeros of columns k [1, n].

    ptr: pointers [ROWS, 1] to the first group of each row. IS_ONE: all of k is in the group of column `start`.
    """
    if GROUP == 0:
        return tl.load(ptr)
    elif IS_ONE:
        return tl.load(ptr + start // GROUP)
    else:
        return tl.load(ptr + tl.minimum(k, K - 1) // GROUP)


@triton.jit
def _values(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    start,
    width,
    K,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    FAST: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):
    """Return the weight's values [ROWS, BLOCK_K] from column `start` on.

    Pointers [ROWS, 1] are to the rows; width: codes per row in memory. FAST: scales and values are bf16, groups are
    multiples of 32 columns, and codes are scaled in bf16. IS_PLAIN: uses only operations of Triton's interpreter.
    """
    IS_INT4: tl.constexpr = LAYOUT == "int4_tiled"
    IS_ONE: tl.constexpr = GROUP == 0 or GROUP % BLOCK_K == 0
    LENGTH: tl.constexpr = BLOCK_K // 8 if IS_INT4 else BLOCK_K
    offset = tl.arange(0, LENGTH)[None, :]
    first = start // 8 if IS_INT4 else start
    if EVEN:
        codes = tl.load(codes_ptr + first + offset)
    else:
        codes = tl.load(codes_ptr + first + offset, mask=first + offset < width, other=0.0)
    if IS_INT4 and FAST:
        k = start + offset // 16 * 128 + offset % 4 * 32  # the first column of each word
        scales = duplicate_halves(_load_groups(scales_ptr, start, k, K, GROUP, IS_ONE).to(tl.int16, bitcast=True))
        if HAS_ZEROS:
            zeros = duplicate_halves(_load_groups(zeros_ptr, start, k, K, GROUP, IS_ONE).to(tl.int32) + 0x4300)
        else:
            zeros = tl.full((1, 1), 0x43084308, tl.int32)
        zeros, scales = tl.broadcast_to(zeros, codes.shape), tl.broadcast_to(scales, codes.shape)
        a, b, c, d, e, f, g, h = pairs_bf16(codes, zeros, scales)
        return order_int4_columns(a, b, c, d, e, f, g, h, ROWS, BLOCK_K)
    else:
        if IS_INT4:
            if IS_PLAIN:
                a, b, c, d, e, f, g, h = pairs_plain(codes)
            else:  # zero 0 and scale 1: zeros and scales are applied below, in fp32
                zero_offset, ones = (
                    tl.full(codes.shape, 0x43004300, tl.int32),
                    tl.full(codes.shape, 0x3F803F80, tl.int32),
                )
                a, b, c, d, e, f, g, h = pairs_bf16(codes, zero_offset, ones)
            codes = order_int4_columns(a, b, c, d, e, f, g, h, ROWS, BLOCK_K)
        elif LAYOUT == "bytes_tiled":
            codes = _order_byte_columns(codes, ROWS, BLOCK_K)
        k = start + tl.arange(0, BLOCK_K)[None, :]
        numbers = codes.to(tl.float32)
        if HAS_ZEROS:
            numbers -= _load_groups(zeros_ptr, start, k, K, GROUP, IS_ONE).to(tl.float32)
        elif IS_INT4:
            numbers -= 8.0
        return (numbers * _load_groups(scales_ptr, start, k, K, GROUP, IS_ONE).to(tl.float32)).to(DTYPE)


@triton.jit
def _end_chain(part, chunk, is_end):
    """Return the sum of a chain so far and that of its chunk; at the chain's end the one is added to the other."""
    return tl.where(is_end, 0.0, part), chunk + tl.where(is_end, part, 0.0)


@triton.jit
def product(
    x_at,
    is_token,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    rows,
    second_offset,
    first,
    last,
    K,
    width,
    groups,
    BOTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAIN: tl.constexpr,
    EVEN: tl.constexpr,
    FAST: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return the fp32 products [ROWS, TOKENS] of some weight rows and, if BOTH, of the rows `second_offset` after them.

    x_at: pointers [1, TOKENS] to tokens; rows: [ROWS] row indices into the weight; first, last: the range of columns,
    whole chunks. CHAIN: columns of a chain; CHUNK, where a chunk is one.
    """
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    row = rows.to(tl.int64)[:, None]
    codes_at, group = codes_ptr + row * width, row // GROUP_ROWS * groups
    scales_at, zeros_at = scales_ptr + group, zeros_ptr + group
    second_row = rows.to(tl.int64)[:, None] + second_offset
    second_codes, group = codes_ptr + second_row * width, second_row // GROUP_ROWS * groups
    second_scales, second_zeros = scales_ptr + group, zeros_ptr + group
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    chunk = tl.zeros((ROWS, TOKENS), tl.float32)
    part = tl.zeros((ROWS, TOKENS), tl.float32)
    second = tl.zeros((ROWS, TOKENS), tl.float32)
    second_chunk = tl.zeros((ROWS, TOKENS), tl.float32)
    second_part = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            x = tl.load(x_at + k[:, None], mask=is_token, other=0.0)
        else:
            x = tl.load(x_at + k[:, None], mask=is_token & (k < K)[:, None], other=0.0)
        weight = _values(
            codes_at,
            scales_at,
            zeros_at,
            start,
            width,
            K,
            DTYPE,
            GROUP,
            HAS_ZEROS,
            LAYOUT,
            ROWS,
            BLOCK_K,
            EVEN,
            FAST,
            WIDEN,
        )
        part = dot(weight, x, part, WIDEN)
        if BOTH:
            weight = _values(
                second_codes,
                second_scales,
                second_zeros,
                start,
                width,
                K,
                DTYPE,
                GROUP,
                HAS_ZEROS,
                LAYOUT,
                ROWS,
                BLOCK_K,
                EVEN,
                FAST,
                WIDEN,
            )
            second_part = dot(weight, x, second_part, WIDEN)
        if CHAIN < CHUNK:
            is_end = (start + BLOCK_K) % CHAIN == 0
            part, chunk = _end_chain(part, chunk, is_end)
            if BOTH:
                second_part, second_chunk = _end_chain(second_part, second_chunk, is_end)
        if (start + BLOCK_K) % CHUNK == 0:
            if CHAIN < CHUNK:
                total += chunk
                chunk = tl.zeros((ROWS, TOKENS), tl.float32)
            else:
                total += part
                part = tl.zeros((ROWS, TOKENS), tl.float32)
            if BOTH and CHAIN < CHUNK:
                second += second_chunk
                second_chunk = tl.zeros((ROWS, TOKENS), tl.float32)
            elif BOTH:
                second += second_part
                second_part = tl.zeros((ROWS, TOKENS), tl.float32)
    if CHAIN < CHUNK:
        part, second_part = chunk + part, second_chunk + second_part
    return total + part, second + second_part


def chain_length(x: Tensor, weight: Weight) -> int:
    """Return the columns of x that are accumulated from zero."""
    if x.element_size() == 2:
        return CHUNK
    # 4-bit codes are ordered by 128 columns, and shorter chains of them would spill registers.
    return 256 if weight.is_int4 else fp32_block(weight)


def fp32_block(weight: Weight) -> int:
    """Return the columns of a block in fp32: few, for a small error, but as many as the codes are ordered by."""
    return 128 if weight.is_int4 else 64


def weight_arguments(x: Tensor, weight: Weight, block: int) -> dict[str, Any]:
    """Return the kernel arguments that describe a weight multiplied with x in blocks of `block` columns."""
    length, group = x.shape[-1], weight.group(x.shape[-1])
    is_int4 = weight.is_int4
    is_fast = is_int4 and x.dtype == weight.scales.dtype == torch.bfloat16 and group % RUN == 0
    return {
        "K": length,
        "width": weight.codes.shape[-1],
        "groups": weight.scales.shape[-1],
        "GROUP": group,
        "GROUP_ROWS": weight.rows,
        "HAS_ZEROS": weight.zeros is not None,
        "LAYOUT": weight.layout,
        "CHUNK": CHUNK,
        "CHAIN": chain_length(x, weight),
        "EVEN": length % block == 0,
        "FAST": is_fast and not is_interpreting(),
        "WIDEN": is_interpreting(),
    }
