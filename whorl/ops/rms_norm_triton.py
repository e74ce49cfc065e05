"""RMSNorm kernels: a row stays in registers from its one read to its one write."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors


@triton.jit
def _inverse_rms(total, C: tl.constexpr, eps):
    """Correctly rounded: one a row, where the fast reciprocal root would be the largest error in fp32."""
    return tl.div_rn(1.0, tl.sqrt_rn(total / C + eps))


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    T,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < C)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + rows * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * C + columns, total, mask=mask)
        x = total.to(tl.float32)  # the norm is of the rounded sum
    weight = tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    inverse = _inverse_rms(tl.sum(x * x, 1), C, eps)[:, None]
    tl.store(y_ptr + rows * C + columns, (x * inverse * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    residual_grad_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    residual_grad_stride,
    eps,
    T,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Each program takes every num_programs-th row and keeps its share of the weight gradient in registers."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, T, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        inverse = _inverse_rms(tl.sum(x * x, 0), C, eps)
        unit = x * inverse
        scaled = dy * weight
        dx = inverse * (scaled - unit * (tl.sum(scaled * unit, 0) / C))
        if HAS_RESIDUAL:
            dx += tl.load(residual_grad_ptr + row * residual_grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * C + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * unit
    tl.store(partial_ptr + program * C + columns, dweight, mask=mask)


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """y and, with a residual, the new residual (else y again)."""
    rows = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    other = rows if residual is None else _rows(residual)
    width, block = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    at_once, num_warps = _blocks(rows.shape[0], block, multiprocessors(x.device))
    if rows.shape[0]:
        _rms_norm_kernel[(triton.cdiv(rows.shape[0], at_once),)](
            rows,
            other,
            weight.contiguous(),
            y,
            total,
            rows.stride(0),
            other.stride(0),
            eps,
            rows.shape[0],
            C=width,
            ROWS=at_once,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            PLUS_ONE=plus_one,
            num_warps=num_warps,
        )
    return y, total


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, residual_grad: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    rows, grads = _rows(x), _rows(dy)
    other = grads if residual_grad is None else _rows(residual_grad)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    programs = max(1, min(rows.shape[0], 2 * multiprocessors(x.device)))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward_kernel[(programs,)](
        grads,
        rows,
        weight.contiguous(),
        other,
        dx,
        partial,
        grads.stride(0),
        rows.stride(0),
        other.stride(0),
        eps,
        rows.shape[0],
        C=width,
        BLOCK=triton.next_power_of_2(width),
        HAS_RESIDUAL=residual_grad is not None,
        PLUS_ONE=plus_one,
        num_warps=_num_warps(width),
    )
    return dx, partial.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    """[T, C] with unit stride along C: a view where strides allow one."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _blocks(rows: int, block: int, processors: int) -> tuple[int, int]:
    """Rows and warps of a program: 16384 channels in 16 warps, or one long row in 4; all processors busy first.

    Measured on H200: 16384 x 4096 takes 70.3 us so and 71.4 us a row at a time, 4096 x 7168 takes 32.1 and 32.9 us.
    """
    if block >= 8192:
        return 1, min(16, 4 * block // 8192)
    at_once = max(1, min(16384 // block, triton.next_power_of_2(rows // processors + 1) // 2))
    return at_once, max(1, min(16, at_once * block // 1024))


def _num_warps(width: int) -> int:
    """16 bytes a thread for each of four loads in flight, in bf16."""
    return max(1, min(16, triton.next_power_of_2(width) // 1024))
