# mypy: allow-untyped-defs
"""Kernels of gated activations: a program takes a block of one row and reads gate and up once.

The blocks of a row have adjacent program ids, so that programs that run at once read adjacent memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gelu import CUBE, SLOPE
from ._launch_triton import launched, prepare
from ._overlap_triton import begin, follow, overlap_level, overlap_options
from ._rows import ceil_div, empty_like, flat_rows

BLOCK = 1024


@triton.jit
def row_and_block(F, BLOCK: tl.constexpr):
    """Return this program's row, and its block of the F columns."""
    blocks = tl.cdiv(F, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks


@triton.jit
def _load_gate_up(x_ptr, columns, F, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    if INTERLEAVED:  # one contiguous read, split in registers
        start = tl.min(columns, 0)
        both_columns = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(x_ptr + both_columns, mask=both_columns < 2 * F, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        mask = columns < F
        gate = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + F + columns, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _share(gate, GELU: tl.constexpr, CUBE: tl.constexpr, SLOPE: tl.constexpr):
    """Return activation(gate) / gate."""
    return tl.sigmoid(SLOPE * (gate + CUBE * gate * gate * gate)) if GELU else tl.sigmoid(gate)


@launched
@triton.jit
def _glu_kernel(
    x_ptr, y_ptr, x_stride, F, GELU: tl.constexpr, INTERLEAVED: tl.constexpr, CUBE: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    begin(OVERLAP)
    follow(OVERLAP)
    row, block = row_and_block(F, BLOCK)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    gate, up = _load_gate_up(x_ptr + row * x_stride, columns, F, INTERLEAVED, BLOCK)
    y = gate * _share(gate, GELU, CUBE, SLOPE) * up
    tl.store(y_ptr + row * F + columns, y.to(y_ptr.dtype.element_ty), mask=columns < F)


@launched
@triton.jit
def _glu_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, dy_stride, x_stride, F, GELU: tl.constexpr, INTERLEAVED: tl.constexpr, CUBE: tl.constexpr,
    SLOPE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = row_and_block(F, BLOCK)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    gate, up = _load_gate_up(x_ptr + row * x_stride, columns, F, INTERLEAVED, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    share = _share(gate, GELU, CUBE, SLOPE)
    rise = gate * (1 - share)
    if GELU:
        rise = rise * SLOPE * (1 + 3 * CUBE * gate * gate)
    dgate = dy * up * share * (1 + rise)
    dup = dy * gate * share
    dx_ptr += row * 2 * F
    dtype = dx_ptr.dtype.element_ty
    if INTERLEAVED:
        both_columns = 2 * block * BLOCK + tl.arange(0, 2 * BLOCK)
        both = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
        tl.store(dx_ptr + both_columns, both.to(dtype), mask=both_columns < 2 * F)
    else:
        tl.store(dx_ptr + columns, dgate.to(dtype), mask=mask)
        tl.store(dx_ptr + F + columns, dup.to(dtype), mask=mask)


def forward(x: Tensor, activation: str, interleaved: bool) -> Tensor:
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if y.numel():
        options = overlap_options(overlap_level(x))
        x = flat_rows(x)
        _launch(_glu_kernel, x.shape, x.stride(0), activation=activation, interleaved=interleaved, **options)(x, y)
    return y


def backward(dy: Tensor, x: Tensor, activation: str, interleaved: bool) -> Tensor:
    dx = empty_like(x)
    if dx.numel():
        x, dy = flat_rows(x), flat_rows(dy)
        launch = _launch(
            _glu_backward_kernel, x.shape, dy.stride(0), x.stride(0), activation=activation, interleaved=interleaved
        )
        launch(dy, x, dx)
    return dx


@functools.lru_cache(maxsize=1024)
def _launch(
    kernel: Any, shape: torch.Size, *strides: int, activation: str, interleaved: bool, **options: Any
) -> Callable[..., None]:
    """Return the launch for x of this shape, [T, 2F], and for tensors with these strides. options: of the kernel."""
    rows, width = shape[0], shape[1] // 2
    grid = (rows * ceil_div(width, BLOCK),)
    constants = {"GELU": activation == "gelu_tanh", "INTERLEAVED": interleaved, "CUBE": CUBE, "SLOPE": SLOPE}
    return prepare(kernel, grid, *strides, width, **constants, BLOCK=BLOCK, num_warps=4, **options)
