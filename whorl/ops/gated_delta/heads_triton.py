# mypy: allow-untyped-defs
"""Norms over the channels of a head, and products with a gate, in Triton: a block of rows a program.

One kernel for each direction serves `l2_norm`, `gated_rms_norm` and `output_gate`, which differ in constants.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched
from .._rows import as_rows, ceil_div, power_of_2
from .._sums_triton import row_sum

NUMBERS = 2048  # of a block


@triton.jit
def inverse_norm(x, eps, C: tl.constexpr, IS_MEAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return 1 / the norm of rows, [ROWS, 1], correctly rounded."""
    total = row_sum(x * x, ROWS, BLOCK)
    if IS_MEAN:
        total = total / C
    return tl.div_rn(1.0, tl.sqrt_rn(total + eps))[:, None]


@triton.jit
def gated(x, gate, IS_SILU: tl.constexpr):
    """Return x times silu(gate) or sigmoid(gate)."""
    share = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    return x * (gate * share if IS_SILU else share)


@triton.jit
def _load(x_ptr, rows, B, stride_a, stride_b, columns, mask):
    at = x_ptr + (rows // B).to(tl.int64) * stride_a + (rows % B).to(tl.int64) * stride_b + columns
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@launched
@triton.jit
def _heads_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    x_stride_a,
    x_stride_b,
    gate_stride_a,
    gate_stride_b,
    eps,
    T,
    B,
    C: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_MEAN: tl.constexpr,
    IS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = norm(x) weight activation(gate), of which each may be absent."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < C)
    y = _load(x_ptr, rows, B, x_stride_a, x_stride_b, columns, mask)
    if HAS_NORM:
        y *= inverse_norm(y, eps, C, IS_MEAN, ROWS, BLOCK)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        y = gated(y, _load(gate_ptr, rows, B, gate_stride_a, gate_stride_b, columns, mask), IS_SILU)
    tl.store(y_ptr + rows.to(tl.int64) * C + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _heads_backward_kernel(
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    dy_stride_a,
    dy_stride_b,
    x_stride_a,
    x_stride_b,
    gate_stride_a,
    gate_stride_b,
    eps,
    T,
    B,
    C: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_MEAN: tl.constexpr,
    IS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dx, dgate, and a share of dweight: the sum over this program's rows."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < C)
    x = _load(x_ptr, rows, B, x_stride_a, x_stride_b, columns, mask)
    grad = _load(dy_ptr, rows, B, dy_stride_a, dy_stride_b, columns, mask)
    to = rows.to(tl.int64) * C + columns
    inverse = tl.full((ROWS, 1), 1.0, tl.float32)
    if HAS_NORM:
        inverse = inverse_norm(x, eps, C, IS_MEAN, ROWS, BLOCK)
    unit = x * inverse
    active = tl.full((ROWS, BLOCK), 1.0, tl.float32)
    weight = tl.full((1, BLOCK), 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate = _load(gate_ptr, rows, B, gate_stride_a, gate_stride_b, columns, mask)
        share = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
        slope = share * (1.0 - share)
        if IS_SILU:
            slope = share * (1.0 + gate * (1.0 - share))
        active = gate * share if IS_SILU else share
        tl.store(dgate_ptr + to, (grad * weight * unit * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    if weight_ptr is not None:
        share_of_weight = tl.sum(grad * active * unit, 0)[None, :]
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * C + columns, share_of_weight, mask=columns < C)
    dx = grad * weight * active
    if HAS_NORM:
        moved = tl.sum(dx * unit, 1)[:, None]
        if IS_MEAN:
            moved = moved / C
        dx = inverse * (dx - unit * moved)
    tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    return _forward(x, None, None, eps, HAS_NORM=True, IS_MEAN=False, IS_SILU=False)


def l2_norm_backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    return _backward(dy, x, None, None, eps, HAS_NORM=True, IS_MEAN=False, IS_SILU=False)[0]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    return _forward(x, gate, weight, eps, HAS_NORM=True, IS_MEAN=True, IS_SILU=activation == "silu")


def gated_rms_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgate, dweight = _backward(dy, x, gate, weight, eps, HAS_NORM=True, IS_MEAN=True, IS_SILU=activation == "silu")
    assert dgate is not None
    assert dweight is not None
    return dx, dgate, dweight


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _forward(x, gate, None, 0.0, HAS_NORM=False, IS_MEAN=False, IS_SILU=False)


def output_gate_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate, _ = _backward(dy, x, gate, None, 0.0, HAS_NORM=False, IS_MEAN=False, IS_SILU=False)
    assert dgate is not None
    return dx, dgate


def _rows(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[int], int]:
    """Return the tensors as [A, B, C] of equal shapes, their strides, and B. None has the strides 0."""
    views = [None if x is None else as_rows(x) for x in tensors]
    shapes = {x.shape for x in views if x is not None}
    if len(shapes) > 1:  # some could be merged without a copy and others not
        views = [None if x is None else x.reshape(1, -1, x.shape[-1]) for x in views]
    strides = [stride for x in views for stride in ((0, 0) if x is None else x.stride()[:2])]
    return views, strides, next(x.shape[1] for x in views if x is not None)


def _blocks(x: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Return the number of rows, of programs, and the constants of a launch."""
    count, block = x.numel() // x.shape[-1], power_of_2(x.shape[-1])
    at_once = max(1, NUMBERS // block)
    constants = {"C": x.shape[-1], "ROWS": at_once, "BLOCK": block, "num_warps": 4, "enable_fp_fusion": False}
    return count, ceil_div(count, at_once), constants


def _forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, **constants: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    (x, gate), strides, inner = _rows(x, gate)  # type: ignore[assignment]
    count, programs, sizes = _blocks(y)
    weight = None if weight is None else weight.contiguous()
    _heads_kernel[(programs,)](x, gate, weight, y, *strides, eps, count, inner, **constants, **sizes)
    return y


def _backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, **constants: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty_like(dx)
    if not dx.numel():
        return dx, dgate, None if weight is None else torch.zeros_like(weight)
    (dy, x, gate), strides, inner = _rows(dy, x, gate)  # type: ignore[assignment]
    count, programs, sizes = _blocks(dx)
    partial = None
    if weight is not None:
        partial = torch.empty(programs, dx.shape[-1], dtype=torch.float32, device=dx.device)
        weight = weight.contiguous()
    _heads_backward_kernel[(programs,)](
        dy, x, gate, weight, dx, dgate, partial, *strides, eps, count, inner, **constants, **sizes
    )
    dweight = None if weight is None or partial is None else partial.sum(0).to(weight.dtype)
    return dx, dgate, dweight
