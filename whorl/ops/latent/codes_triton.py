# mypy: allow-untyped-defs
"""8-bit caches in Triton: codes and scales with the bits of `codes.py`, and the Hadamard transform."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import CODES, GROUP, LARGEST, LEAST

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)
GROUP_SIZE = tl.constexpr(GROUP)


@triton.jit
def scale_for(largest):
    """Return largest / 448, rounded up to a power of two; largest: magnitudes in fp32."""
    least = tl.maximum(largest, tl.full(largest.shape, _LEAST, tl.float32))
    bits = tl.div_rn(least, tl.full(largest.shape, _LARGEST, tl.float32)).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def codes_for(x, scale):
    """Return x / scale, clamped to the range of e4m3, in fp32; NaN stays NaN. scale: powers of two in x's shape."""
    codes = tl.div_rn(x, scale)
    codes = tl.where(x == x, tl.minimum(tl.maximum(codes, -_LARGEST), _LARGEST), codes)
    return codes


@triton.jit
def hadamard_rows(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Compute `hadamard` of rows [ROWS, D] by sums and differences, in the order of the reference."""
    return _butterfly(x, ROWS, D, 1) * (D**-0.5)


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    if WIDTH == D:
        return x
    else:
        pairs = tl.permute(tl.reshape(x, (ROWS, D // (2 * WIDTH), 2, WIDTH)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        both = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        return _butterfly(tl.reshape(both, (ROWS, D)), ROWS, D, 2 * WIDTH)


def byte_views(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View a cache of bytes as codes, fp32 and bf16; element offsets are byte offsets divided by 1, 4 and 2."""
    return cache.view(CODES), cache.view(torch.float32), cache.view(torch.bfloat16)
