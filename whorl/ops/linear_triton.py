# mypy: allow-untyped-defs
"""Matrix products in Triton: the order in which a row's products are summed never depends on the number of rows.

| regime                                | kernel                                                                 |
|---------------------------------------|------------------------------------------------------------------------|
| more than 64 rows                     | torch's own product, where linear_library.py finds equal bits          |
| fp32                                  | that of linear_fp32_triton.py                                          |
| up to 8 rows on Hopper                | those of few_rows_hopper_triton.py and few_rows_large_hopper_triton.py |
| up to 16 rows                         | `_few_kernel`                                                          |
| all others                            | `_tile_kernel`                                                         |

The kernels for Hopper are in Gluon and run where `fits` of few_rows_hopper_triton.py takes the tensors.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from . import linear_fp32_triton, linear_library
from ._hopper import on_hopper
from ._launch_triton import launched, prepare
from ._overlap_triton import begin, follow, overlap_level, overlap_options
from ._rows import ceil_div, unit_stride

FEW = 16  # rows of x that _few_kernel takes
MODERATE = 64  # rows of one tile; up to here torch's product is no faster
MANY = 256  # rows up to which reading the weight takes longer than multiplying by it
WIDE = 32768  # columns from which a weight (such as an LM head) has many more tiles than run at once
NARROW = 4096  # columns below which large tiles would leave multiprocessors idle; with few rows, at that many, too

few_rows_on_hopper = on_hopper(f"{__package__}.few_rows_hopper_triton")


@triton.jit
def dot(a, b, total, WIDEN: tl.constexpr):
    """Return total + a @ b in fp32. WIDEN: convert operands to fp32, since the interpreter has no bf16 products."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@launched
@triton.jit(do_not_specialize_on_alignment=["T"])
def _few_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    weight_stride,
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply up to ROWS rows of x by COLUMNS rows of the weight, which is the left operand, since it fills a tile.

    EVEN: K is a multiple of BLOCK_K, so that loads need no mask along K. With one token the time is that of the loads,
    and masks on them cost an eighth of it.
    """
    follow(OVERLAP)
    begin(OVERLAP)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x_ptr + rows.to(tl.int64)[None, :] * x_stride
    weight_at = weight_ptr + (columns % N).to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            x = tl.load(x_at + k[:, None], mask=(rows < T)[None, :], other=0.0)
            weight = tl.load(weight_at + k[None, :])
        else:
            x = tl.load(x_at + k[:, None], mask=(k < K)[:, None] & (rows < T)[None, :], other=0.0)
            weight = tl.load(weight_at + k[None, :], mask=(k < K)[None, :], other=0.0)
        total = dot(weight, x, total, WIDEN)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(rows < T)[None, :] & (columns < N)[:, None])


@launched
@triton.jit(do_not_specialize_on_alignment=["T"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    weight_stride,
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one tile of the product.

    Tiles that run at the same time cover GROUP blocks of rows and few blocks of columns, so that they share L2 lines.
    """
    follow(OVERLAP)
    row_blocks, column_blocks = tl.cdiv(T, ROWS), tl.cdiv(N, COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP * column_blocks) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    inside = program % (GROUP * column_blocks)
    rows = (first + inside % height) * ROWS + tl.arange(0, ROWS)
    columns = (inside // height) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns past the end wrap around to the first ones and are not stored: the loop needs no mask for them.
    x_at = x_ptr + (rows % T).to(tl.int64)[:, None] * x_stride
    weight_at = weight_ptr + (columns % N).to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + k[None, :], mask=(k < K)[None, :], other=0.0)
        weight = tl.load(weight_at + k[:, None], mask=(k < K)[:, None], other=0.0)
        total = dot(x, weight, total, WIDEN)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(rows < T)[:, None] & (columns < N)[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear`, by torch's own product where a trial showed equal bits, else by our kernels."""
    x, weight = unit_stride(x), unit_stride(weight)
    if len(x) > MODERATE and (y := linear_library.multiply(x, weight, bias, _ours)) is not None:
        return y
    return _ours(x, weight, bias)


def _ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` by our kernels; x and weight have unit stride along K."""
    if x.element_size() == 4:
        return linear_fp32_triton.forward(x, weight, bias)
    if len(x) <= FEW and (hopper := few_rows_on_hopper(x, weight, bias)) is not None:
        return hopper.linear(x, weight, bias)  # type: ignore[no-any-return]
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if y.numel():
        launch = _launch(x.shape, weight.shape[0], x.stride(0), weight.stride(0), bias is not None, overlap_level(x))
        launch(x, weight, y if bias is None else bias.contiguous(), y)
    return y


@functools.lru_cache(maxsize=1024)
def _launch(
    shape: torch.Size, columns: int, stride: int, weight_stride: int, has_bias: bool, level: int
) -> Callable[..., None]:
    """Return the launch for x of this shape and tensors with these strides. level: `overlap_level`."""
    count, length = shape
    is_few = count <= FEW
    plan = few_plan(columns, length) if is_few else tile_plan(count, columns)
    kernel, height = (_few_kernel, FEW) if is_few else (_tile_kernel, plan["ROWS"])
    options = {"HAS_BIAS": has_bias, "WIDEN": is_interpreting(), **plan, **overlap_options(level)}
    grid = (ceil_div(count, height) * ceil_div(columns, plan["COLUMNS"]),)
    return prepare(kernel, grid, stride, weight_stride, count, columns, length, **options)


def few_plan(columns: int, length: int) -> dict[str, int]:
    """Return the tile sizes of _few_kernel; a narrow weight gets smaller tiles, so that no multiprocessor is idle."""
    if is_interpreting():
        plan = {"COLUMNS": 32, "BLOCK_K": 32}
    elif columns <= NARROW:
        plan = {"COLUMNS": 16, "BLOCK_K": 256, "num_warps": 2, "num_stages": 6}
    else:
        plan = {"COLUMNS": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 6 if columns < WIDE else 4}
    return plan | {"ROWS": FEW, "EVEN": length % plan["BLOCK_K"] == 0}


def tile_plan(count: int, columns: int) -> dict[str, int]:
    """Return the tile sizes of _tile_kernel, chosen by speed alone, since they do not change the bits.

    Tensor cores add 16 products at a time in the order of k, whatever the tile.
    """
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_K": 32, "GROUP": 2}
    if count <= MODERATE and columns < NARROW:
        return {"ROWS": 64, "COLUMNS": 16, "BLOCK_K": 128, "GROUP": 8, "num_warps": 4, "num_stages": 8}
    if count <= MODERATE:
        return {"ROWS": 64, "COLUMNS": 64, "BLOCK_K": 128, "GROUP": 8, "num_warps": 4, "num_stages": 6}
    if count <= MANY:
        return {"ROWS": 128, "COLUMNS": 64, "BLOCK_K": 64, "GROUP": 8, "num_warps": 4, "num_stages": 5}
    return {"ROWS": 256, "COLUMNS": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
