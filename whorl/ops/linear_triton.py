"""Matrix products whose tiles are fixed: what a row's sum is made of never depends on how many rows there are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._rows import ceil_div

DECODE_ROWS = 16  # the fewest that tensor cores take; weights, not arithmetic, are what decoding waits for


@triton.jit
def dot(a, b, total, WIDEN: tl.constexpr):
    """total + a @ b in fp32. The interpreter knows no bf16 products: there the operands are widened first."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _linear_kernel(
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
    WIDEN: tl.constexpr,
):
    """Programs that follow each other share a block of weights, which is then read from memory once."""
    row_blocks = tl.cdiv(T, ROWS)
    program = tl.program_id(0)
    rows = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    columns = (program // row_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_at = weight_ptr + columns.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + k[None, :], mask=(rows < T)[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(weight_at + k[:, None], mask=(columns < N)[None, :] & (k < K)[:, None], other=0.0)
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
    plan = _plan(rows, weight.shape[0], x.element_size())
    grid = (ceil_div(x.shape[0], plan["ROWS"]) * ceil_div(weight.shape[0], plan["COLUMNS"]),)
    _linear_kernel[grid](
        x,
        weight,
        y if bias is None else bias.contiguous(),
        y,
        x.stride(0),
        weight.stride(0),
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        HAS_BIAS=bias is not None,
        WIDEN=is_interpreting(),
        **plan,
    )
    return y


def _plan(rows: str, columns: int, element_size: int) -> dict[str, int]:
    """By class and weight only: never by the number of rows. fp32 products run on ordinary cores, in smaller tiles."""
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_K": 64 if rows == "decode" else 32}
    wide = element_size == 4
    if rows == "decode":
        narrow = columns <= 16384  # then all multiprocessors need a share
        return {
            "ROWS": DECODE_ROWS,
            "COLUMNS": 16 if narrow else 64,
            "BLOCK_K": 64 if wide else 256 if narrow else 128,
            "num_warps": 4,
            "num_stages": 4,
        }
    if wide:
        return {"ROWS": 64, "COLUMNS": 64, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
