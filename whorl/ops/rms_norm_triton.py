# mypy: allow-untyped-defs
"""RMSNorm kernels: a row is read once, stays in registers, and is written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors

from ._launch_triton import launched
from ._overlap_triton import begin, follow, overlap
from ._rows import as_rows, ceil_div, empty_like, power_of_2
from ._sums_triton import row_sum

CACHE = 32 * 2**20  # bytes from which a tensor does not stay in the L2 cache
SHARED_MEMORY = 200 * 1024  # bytes that a program may use for blocks in flight; Hopper has 227 KiB


@triton.jit
def _inverse_rms(total, C: tl.constexpr, eps):
    """Return 1 / rms, correctly rounded, from a sum of squares.

    There is one per row, and the error of the fast reciprocal root would dominate the fp32 error.
    """
    return tl.div_rn(1.0, tl.sqrt_rn(total / C + eps))


@triton.jit
def _split_rows(rows, B, NESTED: tl.constexpr):
    """Return the outer and inner index of rows of [A, B, C].

    Without NESTED, A is 1, and there is no 64-bit division to delay the first load.
    """
    if NESTED:
        a, b = rows // B, rows % B
    else:
        a, b = tl.zeros_like(rows), rows
    return a, b


@launched
@triton.jit(do_not_specialize_on_alignment=["T", "B"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    x_stride_a,
    x_stride_b,
    residual_stride_a,
    residual_stride_b,
    eps,
    T,
    B,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NESTED: tl.constexpr,
    POLICY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise ROWS rows. POLICY "evict_first": the tensor exceeds the L2 cache, so no line is kept there."""
    begin(OVERLAP)
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < C)
    a, b = _split_rows(rows, B, NESTED)
    x_at = x_ptr + a * x_stride_a + b * x_stride_b + columns
    x = tl.load(x_at, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if HAS_RESIDUAL:
        at = a * residual_stride_a + b * residual_stride_b + columns
        x += tl.load(residual_ptr + at, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * C + columns, total, mask=mask, eviction_policy=POLICY)
        x = total.to(tl.float32)  # the norm is of the rounded sum
    weight = tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    inverse = _inverse_rms(row_sum(x * x, ROWS, BLOCK), C, eps)[:, None]
    y = (x * inverse * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows * C + columns, y, mask=mask, eviction_policy=POLICY)


@launched
@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    residual_grad_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride_a,
    dy_stride_b,
    x_stride_a,
    x_stride_b,
    residual_grad_stride_a,
    residual_grad_stride_b,
    eps,
    T,
    B,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NESTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx. A program takes every num_programs-th block of rows, and keeps its share of dweight in registers."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in tl.range(program, tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (block * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (rows < T) & (columns < C)
        a, b = _split_rows(rows, B, NESTED)
        x = tl.load(x_ptr + a * x_stride_a + b * x_stride_b + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + a * dy_stride_a + b * dy_stride_b + columns, mask=mask, other=0.0).to(tl.float32)
        inverse = _inverse_rms(tl.sum(x * x, 1), C, eps)[:, None]
        unit = x * inverse
        scaled = dy * weight
        dx = inverse * (scaled - unit * (tl.sum(scaled * unit, 1) / C)[:, None])
        if HAS_RESIDUAL:
            at = a * residual_grad_stride_a + b * residual_grad_stride_b + columns
            dx += tl.load(residual_grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + rows * C + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * unit
    total = tl.sum(dweight, 0)[None, :]
    tl.store(partial_ptr + program * C + columns, total, mask=columns < C)


def forward(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    return add_forward(x, None, weight, eps, plus_one)[0]


def add_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """Return y and, with a residual, the new residual (without one, y again)."""
    y = empty_like(x)
    total = y if residual is None else torch.empty_like(y)
    if not y.numel():
        return y, total
    rows = as_rows(x)
    count, width = rows.shape[0] * rows.shape[1], x.shape[-1]
    other = rows if residual is None else _like(residual, rows)
    at_once, num_warps = _blocks(count, power_of_2(width), multiprocessors(x.device))
    _rms_norm_kernel[(ceil_div(count, at_once),)](
        rows,
        other,
        weight.contiguous(),
        y,
        total,
        *rows.stride()[:2],
        *other.stride()[:2],
        eps,
        count,
        rows.shape[1],
        C=width,
        ROWS=at_once,
        BLOCK=power_of_2(width),
        HAS_RESIDUAL=residual is not None,
        PLUS_ONE=plus_one,
        NESTED=rows.shape[0] > 1,
        POLICY="evict_first" if y.numel() * y.element_size() >= CACHE else "",
        num_warps=num_warps,
        enable_fp_fusion=False,
        **overlap(x),
    )
    return y, total


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, residual_grad: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    dx = empty_like(x)
    if not dx.numel():
        return dx, torch.zeros_like(weight)
    rows = as_rows(x)
    grads = _like(dy, rows)
    other = grads if residual_grad is None else _like(residual_grad, rows)
    count, width = rows.shape[0] * rows.shape[1], x.shape[-1]
    bytes_a_channel = x.element_size() * (2 if residual_grad is None else 3)
    plan = _backward_blocks(count, power_of_2(width), multiprocessors(x.device), bytes_a_channel)
    programs = plan.pop("programs")
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward_kernel[(programs,)](
        grads,
        rows,
        weight.contiguous(),
        other,
        dx,
        partial,
        *grads.stride()[:2],
        *rows.stride()[:2],
        *other.stride()[:2],
        eps,
        count,
        rows.shape[1],
        C=width,
        BLOCK=power_of_2(width),
        HAS_RESIDUAL=residual_grad is not None,
        PLUS_ONE=plus_one,
        NESTED=rows.shape[0] > 1,
        **plan,
    )
    return dx, partial.sum(0).to(weight.dtype)


def _like(x: Tensor, rows: Tensor) -> Tensor:
    """Return x in the shape of `rows`, copied only where its strides require it."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(rows.shape)


def _blocks(rows: int, block: int, processors: int) -> tuple[int, int]:
    """Return the rows and warps of a program. block: channels of a row, rounded up to a power of two.

    A program takes several short rows, unless that would leave a multiprocessor without a program. A warp takes 1024
    channels, 2048 in the longest rows.
    """
    at_once = max(1, min(1024 // block, power_of_2(rows // processors + 1) // 2))
    return at_once, max(1, min(16, at_once * block // (2048 if block >= 8192 else 1024)))


def _backward_blocks(rows: int, block: int, processors: int, bytes_a_channel: int) -> dict[str, int]:
    """Return the launch constants: one program per multiprocessor, which takes 8192 channels at a time.

    It has as many blocks in flight as shared memory holds, up to 3.
    """
    at_once = max(1, min(8192 // block, power_of_2(rows // processors + 1) // 2))
    stages = max(1, min(3, SHARED_MEMORY // (at_once * block * bytes_a_channel)))
    programs = max(1, min(ceil_div(rows, at_once), processors))
    return {
        "ROWS": at_once,
        "STAGES": stages,
        "num_warps": max(1, min(8, at_once * block // 1024)),
        "programs": programs,
    }
