# mypy: allow-untyped-defs
"""Per-token quantisation in Triton: a row is read once, stays in registers, and is written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors

from ._codes_triton import magnitude_bits, row_scale, to_codes
from ._formats import FORMATS
from ._launch_triton import launched
from ._rows import as_rows, ceil_div, power_of_2

BLOCK = 2048  # channels that one program dequantises


@launched
@triton.jit
def _quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride_a,
    x_stride_b,
    T,
    B,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < C)
    at = rows * x_stride_b
    if NESTED:
        at = (rows // B) * x_stride_a + (rows % B) * x_stride_b
    x = tl.load(x_ptr + at + columns, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(magnitude_bits(x), 1), LARGEST)[:, None]
    codes = to_codes(x, scale, LARGEST, IS_INTEGER)
    tl.store(q_ptr + rows * C + columns, codes.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < T)


@launched
@triton.jit
def _dequantize_kernel(q_ptr, scale_ptr, x_ptr, q_stride_a, q_stride_b, B, C, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    at = (row // B) * q_stride_a + (row % B) * q_stride_b
    q = tl.load(q_ptr + at + columns, mask=mask, other=0.0).to(tl.float32)
    x = q * tl.load(scale_ptr + row)
    tl.store(x_ptr + row * C + columns, x.to(x_ptr.dtype.element_ty), mask=mask)


def quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    kind, largest = FORMATS[format]
    q = torch.empty(x.shape, dtype=kind, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if not q.numel():
        return q, scale
    rows = as_rows(x)
    count, width = rows.shape[0] * rows.shape[1], x.shape[-1]
    at_once, num_warps = _blocks(count, power_of_2(width), multiprocessors(x.device))
    _quantize_kernel[(ceil_div(count, at_once),)](
        rows,
        q,
        scale,
        *rows.stride()[:2],
        count,
        rows.shape[1],
        C=width,
        LARGEST=largest,
        IS_INTEGER=kind == torch.int8,
        ROWS=at_once,
        BLOCK=power_of_2(width),
        NESTED=rows.shape[0] > 1,
        num_warps=num_warps,
    )
    return q, scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.empty(q.shape, dtype=dtype, device=q.device)
    if x.numel():
        rows, width = as_rows(q), q.shape[-1]
        grid = (rows.shape[0] * rows.shape[1], ceil_div(width, BLOCK))
        _dequantize_kernel[grid](
            rows, scale.contiguous(), x, *rows.stride()[:2], rows.shape[1], width, BLOCK=BLOCK, num_warps=4
        )
    return x


def _blocks(rows: int, block: int, processors: int) -> tuple[int, int]:
    """Return the rows and warps of a program. block: channels of a row, rounded up to a power of two.

    A program takes several short rows, unless that would leave a multiprocessor without a program. A warp takes 1024
    channels, 32 registers per thread.
    """
    at_once = max(1, min(1024 // block, power_of_2(rows // processors + 1) // 2))
    return at_once, max(1, min(32, at_once * block // 1024))
