# mypy: allow-untyped-defs
"""Grouped matmul in tiles: rows of one expert by columns of its weight, and sums over its rows for the gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot

GROUP = 8  # columns of tiles that are computed together, so that the data they share is still in the L2 cache


@triton.jit
def _find_tile(counts_ptr, columns, E, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return this program's expert (E: none), its first row, the end of the expert's rows, and its tile column."""
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + index, mask=index < E, other=0).to(tl.int32)
    tiles = tl.cdiv(counts, ROWS)
    expert = tl.sum(((tl.cumsum(tiles, 0) * columns <= program) & (index < E)).to(tl.int32), 0)
    is_before, is_current = index < expert, index == expert
    first = tl.sum(tl.where(is_before, counts, 0), 0)
    tile_rows = tl.sum(tl.where(is_current, tiles, 0), 0)
    tile = program - tl.sum(tl.where(is_before, tiles, 0), 0) * columns
    group = tile // tl.maximum(tile_rows * GROUP, 1)
    tile_columns = tl.maximum(tl.minimum(columns - group * GROUP, GROUP), 1)
    offset = tile - group * tile_rows * GROUP
    row = first + offset // tile_columns * ROWS
    return expert, row, first + tl.sum(tl.where(is_current, counts, 0), 0), group * GROUP + offset % tile_columns


@launched
@triton.jit
def _product_kernel(
    x_ptr,
    weight_ptr,
    counts_ptr,
    y_ptr,
    x_stride,
    stride_e,
    stride_n,
    stride_k,
    N,
    K,
    E,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute a tile of y = x @ weight^T for one expert's weight [N, K]."""
    expert, row, end, column = _find_tile(counts_ptr, tl.cdiv(N, COLUMNS), E, BLOCK_E, ROWS, GROUP)
    if expert < E:
        rows = row + tl.arange(0, ROWS)
        columns = column * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = rows < end, columns < N
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_at = weight_ptr + expert.to(tl.int64) * stride_e
        weight_at += columns.to(tl.int64)[None, :] * stride_n + k.to(tl.int64)[:, None] * stride_k
        y = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, BLOCK_K):
            x = tl.load(x_at, mask=is_row[:, None] & (k < K - start)[None, :], other=0.0)
            weight = tl.load(weight_at, mask=is_column[None, :] & (k < K - start)[:, None], other=0.0)
            y = dot(x, weight, y, WIDEN)
            x_at += BLOCK_K
            weight_at += BLOCK_K * stride_k
        to = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@launched
@triton.jit
def _weight_kernel(
    dy_ptr,
    x_ptr,
    counts_ptr,
    dweight_ptr,
    dy_stride,
    x_stride,
    N,
    K,
    E,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute a tile of one expert's weight gradient, dy^T x over its rows; zeros when it has no rows."""
    expert = tl.program_id(1)
    tile_rows, tile_columns = tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS)
    group = tl.program_id(0) // (tile_rows * GROUP)
    offset = tl.program_id(0) - group * tile_rows * GROUP
    step = tl.minimum(tile_columns - group * GROUP, GROUP)
    n = offset // step * ROWS + tl.arange(0, ROWS)
    k = (group * GROUP + offset % step) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + index, mask=index < E, other=0).to(tl.int32)
    first = tl.sum(tl.where(index < expert, counts, 0), 0).to(tl.int64)
    count = tl.sum(tl.where(index == expert, counts, 0), 0)
    m = tl.arange(0, BLOCK_M)
    dy_at = dy_ptr + (first + m)[None, :] * dy_stride + n[:, None]
    x_at = x_ptr + (first + m)[:, None] * x_stride + k[None, :]
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, BLOCK_M):
        dy = tl.load(dy_at, mask=(n < N)[:, None] & (m < count - start)[None, :], other=0.0)
        x = tl.load(x_at, mask=(m < count - start)[:, None] & (k < K)[None, :], other=0.0)
        dweight = dot(dy, x, dweight, WIDEN)
        dy_at += BLOCK_M * dy_stride.to(tl.int64)
        x_at += BLOCK_M * x_stride.to(tl.int64)
    to = dweight_ptr + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(to, dweight.to(dweight_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute `grouped_matmul`; weight [E, N, K] is read in place when it has unit stride along N or K."""
    x = unit_stride(x)
    weight = weight if 1 in weight.stride()[1:] else weight.contiguous()
    (count, inner), (experts, width, _) = x.shape, weight.shape
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    plan = product_plan(count // experts, x.element_size())
    tiles = min(count, ceil_div(count, plan["ROWS"]) + experts)  # every expert may have one partly filled tile
    tensors, strides = (x, weight, counts.contiguous(), y), (x.stride(0), *weight.stride())
    grid = (tiles * ceil_div(width, plan["COLUMNS"]),)
    _product_kernel[grid](*tensors, *strides, width, inner, experts, **_common(experts), **plan)
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return forward(dy, weight.transpose(1, 2), counts), _weight_gradient(dy, x, weight, counts)


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return dweight like weight [E, N, K], contiguous."""
    dy, x = unit_stride(dy), unit_stride(x)
    experts, width, inner = weight.shape
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    if dweight.numel():
        plan = weight_plan(x.element_size())
        tensors, strides = (dy, x, counts.contiguous(), dweight), (dy.stride(0), x.stride(0))
        grid = (ceil_div(width, plan["ROWS"]) * ceil_div(inner, plan["COLUMNS"]), experts)
        _weight_kernel[grid](*tensors, *strides, width, inner, experts, **_common(experts), **plan)
    return dweight


def _common(experts: int) -> dict[str, Any]:
    return {"BLOCK_E": power_of_2(experts), "WIDEN": is_interpreting()}


def product_plan(rows: int, element_size: int) -> dict[str, Any]:
    """Return the tile sizes of the forward by the number of rows per expert, assuming an even load."""
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 16, "BLOCK_K": 32, "GROUP": 2}
    if element_size == 4:
        return {"ROWS": 64, "COLUMNS": 64, "BLOCK_K": 32, "GROUP": GROUP, "num_warps": 4, "num_stages": 2}
    if rows <= 64:
        return {"ROWS": 64, "COLUMNS": 128, "BLOCK_K": 64, "GROUP": GROUP, "num_warps": 4, "num_stages": 4}
    return {"ROWS": 128, "COLUMNS": 256, "BLOCK_K": 64, "GROUP": GROUP, "num_warps": 8, "num_stages": 3}


def weight_plan(element_size: int) -> dict[str, Any]:
    """Return the tile sizes of the weight gradient; they affect speed alone."""
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 16, "BLOCK_M": 16, "GROUP": 2}
    if element_size == 4:
        return {"ROWS": 64, "COLUMNS": 64, "BLOCK_M": 32, "GROUP": GROUP, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 256, "BLOCK_M": 64, "GROUP": GROUP, "num_warps": 8, "num_stages": 3}
