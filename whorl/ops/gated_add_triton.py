# mypy: allow-untyped-defs
"""`gated_add` in Triton: a program takes a block of one row; in the backward a whole row, whose gate it sums."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch_triton import launched, prepare
from ._overlap_triton import begin, follow, overlap_level, overlap_options
from ._rows import ceil_div, flat_rows
from .glu_triton import BLOCK, row_and_block


@launched
@triton.jit
def _gated_add_kernel(
    y_ptr, x_ptr, gate_ptr, out_ptr, y_stride, x_stride, gate_stride, C, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin(OVERLAP)
    follow(OVERLAP)
    row, block = row_and_block(C, BLOCK)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    gate = tl.load(gate_ptr + row * gate_stride).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + columns, (y + x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _gated_add_backward_kernel(
    dout_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, dout_stride, x_stride, gate_stride, C, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    share = tl.sigmoid(tl.load(gate_ptr + row * gate_stride).to(tl.float32))
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, C, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < C
        dout = tl.load(dout_ptr + row * dout_stride + columns, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * C + columns, (dout * share).to(dx_ptr.dtype.element_ty), mask=mask)
        total += dout * x
    tl.store(dgate_ptr + row, (tl.sum(total, 0) * share * (1 - share)).to(dgate_ptr.dtype.element_ty))


def forward(y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if out.numel():
        options = overlap_options(overlap_level(y))
        y, x, gates = flat_rows(y), flat_rows(x), flat_rows(gate.unsqueeze(-1))
        _launch(y.shape, y.stride(0), x.stride(0), gates.stride(0), **options)(y, x, gates, out)
    return out


def backward(dout: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    if dx.numel():
        dout, x, gates = flat_rows(dout), flat_rows(x), flat_rows(gate.unsqueeze(-1))
        strides = dout.stride(0), x.stride(0), gates.stride(0)
        prepare(_gated_add_backward_kernel, (len(x),), *strides, x.shape[1], BLOCK=BLOCK, num_warps=4)(
            dout, x, gates, dx, dgate
        )
    else:
        dgate.zero_()
    return dx, dgate


@functools.lru_cache(maxsize=1024)
def _launch(shape: torch.Size, *strides: int, **options: int) -> Callable[..., None]:
    """Return the launch for tensors of this shape [T, C] and these strides."""
    grid = (shape[0] * ceil_div(shape[1], BLOCK),)
    return prepare(_gated_add_kernel, grid, *strides, shape[1], BLOCK=BLOCK, num_warps=4, **options)
