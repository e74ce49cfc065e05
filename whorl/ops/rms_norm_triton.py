# mypy: allow-untyped-defs
"""RMSNorm kernels: a row is read once, stays in registers, and is written once."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import multiprocessors

from ._launch_triton import launched, prepare
from ._overlap_triton import begin, follow, overlap_level, overlap_options
from ._rows import Strides, ceil_div, empty_like, power_of_2, row_strides, row_view
from ._sums_triton import row_sum

CACHE = 32 * 2**20  # bytes from which a tensor does not stay in the L2 cache
SHARED_MEMORY = 200 * 1024  # bytes that a program may use for blocks in flight; Hopper has 227 KiB

SUM_COLUMNS = 32  # columns of dweight that a program adds up: many programs, each with whole 128-byte lines


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
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
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


@launched
@triton.jit
def _sum_kernel(partial_ptr, out_ptr, C, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the programs' shares of dweight, [PARTS, C], and round the sums: one launch instead of torch's two."""
    parts = tl.arange(0, BLOCK_PARTS)[:, None]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    partial = tl.load(partial_ptr + parts * C + columns, mask=(parts < PARTS) & (columns < C), other=0.0)
    total = tl.sum(partial, 0)[None, :]
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < C)


def forward(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    return add_forward(x, None, weight, eps, plus_one)[0]


def add_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """Return y and, with a residual, the new residual (without one, y again)."""
    y = empty_like(x)
    total = y if residual is None else torch.empty_like(y)
    if y.numel():
        level = overlap_level(x)
        x = row_view(x)
        other = x if residual is None else row_view(residual, x)
        strides = x.stride(), None if residual is None else other.stride()
        launch = _forward_launch(x.shape, *strides, x.dtype, multiprocessors(x.device), eps, plus_one, level)
        launch(x, other, weight.contiguous(), y, total)
    return y, total


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    shape: torch.Size,
    strides: Strides,
    residual_strides: Strides | None,
    dtype: torch.dtype,
    processors: int,
    eps: float,
    plus_one: bool,
    level: int,
) -> Callable[..., None]:
    """Return the launch for tensors of these shapes and strides. level: `overlap_level`."""
    (outer, inner, *own), width = row_strides(shape, strides), shape[-1]
    other = own if residual_strides is None else row_strides(shape, residual_strides)[2:]
    count, block = outer * inner, power_of_2(width)
    at_once, num_warps = _blocks(count, block, processors)
    return prepare(
        _rms_norm_kernel,
        (ceil_div(count, at_once),),
        *(*own, *other, eps, count, inner),
        C=width,
        ROWS=at_once,
        BLOCK=block,
        HAS_RESIDUAL=residual_strides is not None,
        PLUS_ONE=plus_one,
        NESTED=outer > 1,
        POLICY="evict_first" if count * width * dtype.itemsize >= CACHE else "",
        num_warps=num_warps,
        enable_fp_fusion=False,
        **overlap_options(level),
    )


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, residual_grad: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    dx = empty_like(x)
    if not dx.numel():
        return dx, torch.zeros_like(weight)
    x = row_view(x)
    dy = row_view(dy, x)
    other = dy if residual_grad is None else row_view(residual_grad, x)
    strides = dy.stride(), x.stride(), None if residual_grad is None else other.stride()
    launch, add, programs = _backward_launches(x.shape, *strides, x.dtype, multiprocessors(x.device), eps, plus_one)
    weight = weight.contiguous()
    dweight = torch.empty_like(weight)
    partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    launch(dy, x, weight, other, dx, partial)
    add(partial, dweight)
    return dx, dweight


@functools.lru_cache(maxsize=1024)
def _backward_launches(
    shape: torch.Size,
    grad_strides: Strides,
    strides: Strides,
    residual_strides: Strides | None,
    dtype: torch.dtype,
    processors: int,
    eps: float,
    plus_one: bool,
) -> tuple[Callable[..., None], Callable[..., None], int]:
    """Return both launches for tensors of these shapes and strides, and the number of programs of the first."""
    (outer, inner, *own), width = row_strides(shape, strides), shape[-1]
    grads = row_strides(shape, grad_strides)[2:]
    other = grads if residual_strides is None else row_strides(shape, residual_strides)[2:]
    bytes_a_channel = dtype.itemsize * (2 if residual_strides is None else 3)
    constants = _backward_blocks(outer * inner, power_of_2(width), processors, bytes_a_channel)
    programs = constants.pop("programs")
    launch = prepare(
        _rms_norm_backward_kernel,
        (programs,),
        *(*grads, *own, *other, eps, outer * inner, inner),
        C=width,
        BLOCK=power_of_2(width),
        HAS_RESIDUAL=residual_strides is not None,
        PLUS_ONE=plus_one,
        NESTED=outer > 1,
        **constants,
    )
    blocks = {"PARTS": programs, "BLOCK_PARTS": power_of_2(programs), "COLUMNS": SUM_COLUMNS}
    return launch, prepare(_sum_kernel, (ceil_div(width, SUM_COLUMNS),), width, **blocks), programs


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
