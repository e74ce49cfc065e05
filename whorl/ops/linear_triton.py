# mypy: allow-untyped-defs
"""Matrix products: what a row's sum is made of never depends on how many rows there are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._overlap_triton import follow, overlap
from ._rows import ceil_div, power_of_2

LARGEST_ROW = 8192  # bytes of a weight row that one warp of a decode kernel holds


@triton.jit
def dot(a, b, total, WIDEN: tl.constexpr):
    """total + a @ b in fp32. The interpreter knows no bf16 products: there the operands are widened first."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _dot_kernel(
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
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A few rows of the weight, read once and kept in registers while every row of x passes by."""
    follow(OVERLAP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride + k[None, :]
    weight = tl.load(weight_at, mask=(columns < N)[:, None] & (k < K)[None, :], other=0.0)
    x_at, y_at = x_ptr + k, y_ptr + columns
    for _ in range(T):
        x = tl.load(x_at, mask=k < K, other=0.0)
        total = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=columns < N)
        x_at, y_at = x_at + x_stride, y_at + N


@triton.jit
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
    """One tile. Tiles that run together take GROUP blocks of rows and few of columns: both then come from the cache."""
    follow(OVERLAP)
    row_blocks, column_blocks = tl.cdiv(T, ROWS), tl.cdiv(N, COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP * column_blocks) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    inside = program % (GROUP * column_blocks)
    rows = (first + inside % height) * ROWS + tl.arange(0, ROWS)
    columns = (inside // height) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns past the end are read from the start and not stored: the loop needs no mask for them.
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


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, rows: str) -> Tensor:
    x, weight = unit_stride(x), unit_stride(weight)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    added = y if bias is None else bias.contiguous()
    tensors, sizes = (x, weight, added, y), (x.stride(0), weight.stride(0), x.shape[0], *weight.shape)
    if rows == "decode":
        plan = decode_plan(weight.shape[1], x.element_size())
        grid = (ceil_div(weight.shape[0], plan["COLUMNS"]),)
        _dot_kernel[grid](*tensors, *sizes, HAS_BIAS=bias is not None, **plan, **overlap(x))
    else:
        plan = tile_plan(rows, x.shape[0], weight.shape[0], x.element_size())
        grid = (ceil_div(x.shape[0], plan["ROWS"]) * ceil_div(weight.shape[0], plan["COLUMNS"]),)
        _tile_kernel[grid](*tensors, *sizes, HAS_BIAS=bias is not None, WIDEN=is_interpreting(), **plan, **overlap(x))
    return y


def decode_plan(length: int, element_size: int) -> dict[str, int]:
    """By the weight alone, never by the number of rows: how a sum is cut decides its bits.

    A warp that keeps its sums to itself needs no barrier, and many small programs keep more bytes in flight than a few
    large ones; `element_size * block` bytes over 32 lanes have to fit in registers.
    """
    block = power_of_2(length)
    return {
        "COLUMNS": 1,
        "BLOCK_K": block,
        "num_warps": max(1, block * element_size // LARGEST_ROW),
    }


def tile_plan(rows: str, count: int, columns: int, element_size: int) -> dict[str, int]:
    """What may depend on the number of rows is the tile's height, while the instruction stays the same.

    Two warps multiply with 16 rows at an instruction, eight with 64; each adds 16 products at a time, in the order of
    k, whatever the tile. fp32 products run on ordinary cores, in small tiles.
    """
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_K": 32, "GROUP": 2}
    if element_size == 4:
        return {"ROWS": 64, "COLUMNS": 64, "BLOCK_K": 32, "GROUP": 8, "num_warps": 8, "num_stages": 2}
    if rows == "batch":
        few, narrow = count <= 16, columns < 4096  # a narrow weight is cut finer, or multiprocessors stand idle
        return {
            "ROWS": 16 if few else 64,
            "COLUMNS": 16 if narrow else 32,
            "BLOCK_K": (512 if narrow else 256) if few else (256 if narrow else 128),
            "GROUP": 8,
            "num_warps": 2,
            "num_stages": 5 if few else 3,
        }
    return {"ROWS": 256, "COLUMNS": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
