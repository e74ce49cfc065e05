# mypy: allow-untyped-defs
"""Log-softmax kernels: one program per row, which walks the row's blocks from first to last.

The bits depend on BLOCK, which V alone decides, and on nothing else: each of the BLOCK columns sums its own numbers,
and the columns are added in a tree that is written out. `tl.sum` would add in an order that follows from the threads,
and so from strides and dtypes. Kernels are compiled without FMA fusion.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch_triton import launched, prepare
from ._rows import Strides, power_of_2, row_strides, row_view

LARGEST_BLOCK = 8192
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32, so that differences to it are not NaN


@triton.jit
def _row_at(row, B, stride_a, stride_b, NESTED: tl.constexpr):
    """Return the offset of a row of [A, B, V]. Without NESTED, A is 1, and no 64-bit division delays the first load."""
    return row // B * stride_a + row % B * stride_b if NESTED else row * stride_b


@triton.jit
def _tree_sum(x, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Return the sum of x [BLOCK], adding neighbours in pairs, so that the order does not depend on the threads."""
    for step in tl.static_range(1, STEPS + 1):
        x = tl.sum(tl.reshape(x, (BLOCK >> step, 2)), 1)
    return tl.sum(x, 0)  # one number is left


@triton.jit
def _load(x_ptr, columns, V):
    return tl.load(x_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _top_and_log_sum(x_ptr, V, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Return the row's maximum, and the logarithm of the sum of exp(x - maximum), in one pass over the row."""
    tops = tl.full((BLOCK,), LOWEST, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = _load(x_ptr, start + tl.arange(0, BLOCK), V)
        above = x - tops
        part = tl.exp(-tl.abs(above))
        totals = tl.where(above > 0, totals * part + 1.0, totals + part)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    return top, tl.log(_tree_sum(totals * tl.exp(tops - top), BLOCK, STEPS))


@triton.jit
def _logprob(x, top, log_sum):
    """Return x - top - log_sum, minus infinity for an absent token; x - top first, so that high logits keep digits."""
    return tl.where(x == float("-inf"), x, x - top - log_sum)


@launched
@triton.jit(do_not_specialize=["B"])
def _log_softmax_kernel(
    x_ptr, y_ptr, x_stride_a, x_stride_b, V, B, NESTED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_at(row, B, x_stride_a, x_stride_b, NESTED)
    y_ptr += row * V
    top, log_sum = _top_and_log_sum(x_ptr, V, BLOCK, STEPS)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = _logprob(_load(x_ptr, columns, V), top, log_sum)
        tl.store(y_ptr + columns, y, mask=columns < V)


@triton.jit
def _load_present(dy_ptr, y_ptr, columns, V):
    """Load dy, with 0 for absent tokens, and y."""
    y = _load(y_ptr, columns, V)
    dy = tl.load(dy_ptr + columns, mask=columns < V, other=0.0)
    return tl.where(y == float("-inf"), 0.0, dy), y


@launched
@triton.jit
def _log_softmax_backward_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    dy_stride_a,
    dy_stride_b,
    y_stride_a,
    y_stride_b,
    V,
    B,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += _row_at(row, B, dy_stride_a, dy_stride_b, NESTED)
    y_ptr += _row_at(row, B, y_stride_a, y_stride_b, NESTED)
    dx_ptr += row * V
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        totals += _load_present(dy_ptr, y_ptr, start + tl.arange(0, BLOCK), V)[0]
    total = _tree_sum(totals, BLOCK, STEPS)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        dy, y = _load_present(dy_ptr, y_ptr, columns, V)
        dx = tl.where(y == float("-inf"), 0.0, dy - tl.exp(y) * total)
        tl.store(dx_ptr + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < V)


@triton.jit
def _load_chosen(x_ptr, token, V):
    """The logit of the row's token; NaN for an id outside the vocabulary."""
    is_token = (token >= 0) & (token < V)
    return tl.load(x_ptr + token, mask=is_token, other=float("nan")).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["B"])
def _token_logprobs_kernel(
    x_ptr, ids_ptr, y_ptr, x_stride_a, x_stride_b, V, B, NESTED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_at(row, B, x_stride_a, x_stride_b, NESTED)
    x = _load_chosen(x_ptr, tl.load(ids_ptr + row), V)
    top, log_sum = _top_and_log_sum(x_ptr, V, BLOCK, STEPS)
    tl.store(y_ptr + row, _logprob(x, top, log_sum))


@launched
@triton.jit
def _token_logprobs_backward_kernel(
    dy_ptr,
    x_ptr,
    ids_ptr,
    dx_ptr,
    x_stride_a,
    x_stride_b,
    V,
    B,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_at(row, B, x_stride_a, x_stride_b, NESTED)
    dx_ptr += row * V
    token = tl.load(ids_ptr + row)
    chosen = _load_chosen(x_ptr, token, V)
    dy = tl.load(dy_ptr + row)
    dy = tl.where(chosen == float("-inf"), 0.0, tl.where(chosen == chosen, dy, chosen))
    top, log_sum = _top_and_log_sum(x_ptr, V, BLOCK, STEPS)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(x_ptr, columns, V)
        dx = tl.where(columns == token, dy, 0.0) - tl.exp(_logprob(x, top, log_sum)) * dy
        dx = tl.where(x == float("-inf"), 0.0, dx)
        tl.store(dx_ptr + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < V)


def forward(logits: Tensor) -> Tensor:
    y = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if y.numel():
        logits = row_view(logits)
        _launch(_log_softmax_kernel, logits.shape, logits.stride())(logits, y)
    return y


def backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.numel():
        y = row_view(y)
        dy = row_view(dy, y)
        _launch(_log_softmax_backward_kernel, y.shape, dy.stride(), y.stride())(dy, y, dx)
    return dx


def token_forward(logits: Tensor, ids: Tensor) -> Tensor:
    y = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if y.numel():
        logits = row_view(logits)
        _launch(_token_logprobs_kernel, logits.shape, logits.stride())(logits, ids.contiguous(), y)
    return y


def token_backward(dy: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if dx.numel():
        rows = row_view(logits)
        launch = _launch(_token_logprobs_backward_kernel, rows.shape, rows.stride())
        launch(dy.contiguous(), rows, ids.contiguous(), dx)
    return dx


@functools.lru_cache(maxsize=1024)
def _launch(kernel: Any, shape: torch.Size, *strides: Strides) -> Callable[..., None]:
    """Return the launch for rows of this shape and these strides; the constants that bits depend on follow from V."""
    outer, inner, *_ = row_strides(shape, strides[0])
    block = min(LARGEST_BLOCK, max(32, power_of_2(shape[-1])))
    return prepare(
        kernel,
        (outer * inner,),
        *(stride for one in strides for stride in row_strides(shape, one)[2:]),
        *(shape[-1], inner),
        NESTED=outer > 1,
        BLOCK=block,
        STEPS=block.bit_length() - 1,
        num_warps=max(1, block // 512),
        enable_fp_fusion=False,
    )
