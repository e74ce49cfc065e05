# mypy: allow-untyped-defs
"""The Hadamard transform in Triton: one small matmul per block of rows with a matrix of signs, built in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, unit_stride
from ..linear_triton import dot


@triton.jit
def _hadamard_kernel(
    x_ptr,
    y_ptr,
    x_stride,
    scale,
    ROWS,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    rows, channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    mask = (rows < ROWS)[:, None] & (channels < D)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + channels[None, :], mask=mask, other=0.0)
    # Entry (i, j) is -1 to the power of the number of set bits of i & j.
    common_bits = channels[:, None] & channels[None, :]
    for shift in tl.static_range(3, -1, -1):
        common_bits ^= common_bits >> (1 << shift)
    signs = (1 - 2 * (common_bits & 1)).to(tl.float32).to(x.dtype)
    y = dot(x, signs, tl.zeros((BLOCK, BLOCK_D), tl.float32), WIDEN) * scale
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * D + channels[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def forward(x: Tensor, scale: float | None) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    dim = x.shape[-1]
    rows = unit_stride(x.reshape(-1, dim))  # copies only when the rows are not evenly spaced
    plan = {"BLOCK": 16} if is_interpreting() else {"BLOCK": 128, "num_warps": 8 if dim > 128 else 4}
    _hadamard_kernel[(ceil_div(rows.shape[0], plan["BLOCK"]),)](
        rows,
        y,
        rows.stride(0),
        dim**-0.5 if scale is None else scale,
        rows.shape[0],
        D=dim,
        BLOCK_D=max(16, dim),
        WIDEN=is_interpreting(),
        **plan,
    )
    return y
