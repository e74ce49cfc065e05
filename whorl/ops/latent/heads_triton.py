# mypy: allow-untyped-defs
"""The linear layer per head in Triton: K is accumulated upwards in one chain, as in `linear`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._overlap_triton import follow, overlap
from .._rows import ceil_div, unit_stride
from ..linear_triton import FEW, dot


@triton.jit
def _head_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_stride_t,
    x_stride_h,
    weight_stride_h,
    weight_stride_n,
    weight_stride_k,
    T,
    H,
    N,
    K,
    IS_FEW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a tile of tokens by columns of one head.

    IS_FEW: the weight is the left operand, because it has enough rows to fill a tile. EVEN: K is a multiple of the
    block and needs no mask.
    """
    follow(OVERLAP)
    head = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(N, COLUMNS)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns past the end wrap around to valid memory, so that the loop needs no mask; they are not stored.
    x_at = x_ptr + (rows % T).to(tl.int64) * x_stride_t + head * x_stride_h
    weight_at = weight_ptr + head * weight_stride_h + (columns % N) * weight_stride_n
    total = tl.zeros((COLUMNS, ROWS) if IS_FEW else (ROWS, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            x = tl.load(x_at[:, None] + k[None, :])
            weight = tl.load(weight_at[:, None] + k[None, :] * weight_stride_k)
        else:
            x = tl.load(x_at[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
            weight = tl.load(weight_at[:, None] + k[None, :] * weight_stride_k, mask=(k < K)[None, :], other=0.0)
        total = dot(weight, tl.trans(x), total, WIDEN) if IS_FEW else dot(x, tl.trans(weight), total, WIDEN)
    if IS_FEW:
        at = y_ptr + (rows.to(tl.int64) * H + head)[None, :] * N + columns[:, None]
        tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(rows < T)[None, :] & (columns < N)[:, None])
    else:
        at = y_ptr + (rows.to(tl.int64) * H + head)[:, None] * N + columns[None, :]
        tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(rows < T)[:, None] & (columns < N)[None, :])


def forward(x: Tensor, weight: Tensor) -> Tensor:
    x = unit_stride(x)
    weight = weight if 1 in weight.stride()[1:] else weight.contiguous()
    (tokens, heads, length), columns = x.shape, weight.shape[1]
    y = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    plan = _plan(tokens, columns, x.element_size())
    programs = ceil_div(tokens, plan["ROWS"]) * ceil_div(columns, plan["COLUMNS"])
    _head_kernel[(programs, heads)](
        x,
        weight,
        y,
        *x.stride()[:2],
        *weight.stride(),
        tokens,
        heads,
        columns,
        length,
        EVEN=length % plan["BLOCK_K"] == 0,
        WIDEN=is_interpreting(),
        enable_fp_fusion=False,
        **plan,
        **overlap(x),
    )
    return y


def _plan(tokens: int, columns: int, element_size: int) -> dict[str, int]:
    """Return tile sizes, which affect speed alone; tiles are small, because there is one matmul per head."""
    if is_interpreting():
        return {"IS_FEW": tokens <= FEW, "ROWS": 16, "COLUMNS": 32, "BLOCK_K": 32}
    if element_size == 4:
        return {"IS_FEW": False, "ROWS": 32, "COLUMNS": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if tokens <= FEW:
        return {"IS_FEW": True, "ROWS": FEW, "COLUMNS": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    if tokens <= 64:
        return {"IS_FEW": False, "ROWS": 64, "COLUMNS": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    return {"IS_FEW": False, "ROWS": 128, "COLUMNS": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
