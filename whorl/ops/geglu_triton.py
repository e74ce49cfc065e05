# mypy: allow-untyped-defs
"""GeGLU kernels: a program takes a block of one row and reads gate and up once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gelu import CUBE, SLOPE
from ._launch_triton import launched
from ._rows import ceil_div, empty_like
from .swiglu_triton import flat_rows, row_and_block

BLOCK = 1024


@triton.jit
def _load(x_ptr, columns, F):
    mask = columns < F
    gate = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + F + columns, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@launched
@triton.jit
def _geglu_kernel(x_ptr, y_ptr, x_stride, F, CUBE: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    row, block = row_and_block(F, BLOCK)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    gate, up = _load(x_ptr + row * x_stride, columns, F)
    y = gate * tl.sigmoid(SLOPE * (gate + CUBE * gate * gate * gate)) * up
    tl.store(y_ptr + row * F + columns, y.to(y_ptr.dtype.element_ty), mask=columns < F)


@launched
@triton.jit
def _geglu_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, dy_stride, x_stride, F, CUBE: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr
):
    row, block = row_and_block(F, BLOCK)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    gate, up = _load(x_ptr + row * x_stride, columns, F)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(SLOPE * (gate + CUBE * gate * gate * gate))
    dgate = dy * up * share * (1 + gate * (1 - share) * SLOPE * (1 + 3 * CUBE * gate * gate))
    dup = dy * gate * share
    dx_ptr += row * 2 * F
    dtype = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + columns, dgate.to(dtype), mask=mask)
    tl.store(dx_ptr + F + columns, dup.to(dtype), mask=mask)


_CONSTANTS = {"CUBE": CUBE, "SLOPE": SLOPE, "BLOCK": BLOCK, "num_warps": 4}


def forward(x: Tensor) -> Tensor:
    rows, width = flat_rows(x), x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (rows.shape[0] * ceil_div(width, BLOCK),)
        _geglu_kernel[grid](rows, y, rows.stride(0), width, **_CONSTANTS)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    rows, grads, width = flat_rows(x), flat_rows(dy), x.shape[-1] // 2
    dx = empty_like(x)
    if dx.numel():
        grid = (rows.shape[0] * ceil_div(width, BLOCK),)
        _geglu_backward_kernel[grid](grads, rows, dx, grads.stride(0), rows.stride(0), width, **_CONSTANTS)
    return dx
