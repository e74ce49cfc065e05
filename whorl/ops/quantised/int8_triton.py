# mypy: allow-untyped-defs
"""`int8_linear` and `int8_experts` in Triton: integer sums are exact, so tile sizes affect speed alone."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2
from ..moe.experts_many_tokens_triton import activate
from ..moe.experts_triton import combine
from ..quant_triton import quantize
from .packed_experts_triton import FEW_TOKENS, Routing, launch_grid, load_pairs, route_by_expert, route_by_token


@triton.jit
def _exact_product(q_at, is_token, codes_at, K, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the int32 product [ROWS, TOKENS].

    q_at: pointers [1, TOKENS] to tokens; codes_at: pointers [ROWS, 1] to rows of the weight.
    """
    total = tl.zeros((ROWS, TOKENS), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        codes = tl.load(codes_at + k[None, :], mask=(k < K)[None, :], other=0)
        q = tl.load(q_at + k[:, None], mask=is_token & (k < K)[:, None], other=0)
        total = tl.dot(codes, q, total, out_dtype=tl.int32)
    return total


@triton.jit
def _apply_scales(total, scales_at, token_scales):
    """Apply both scales in fp32, in the order that the contract states."""
    return total.to(tl.float32) * tl.load(scales_at).to(tl.float32)[:, None] * token_scales[None, :]


@launched
@triton.jit
def _int8_kernel(
    q_ptr,
    token_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < T
    codes_at = codes_ptr + (rows % N).to(tl.int64)[:, None] * K
    total = _exact_product(
        q_ptr + tokens.to(tl.int64)[None, :] * K, is_token[None, :], codes_at, K, ROWS, TOKENS, BLOCK_K
    )
    y = _apply_scales(total, scales_ptr + rows % N, tl.load(token_scales_ptr + tokens, mask=is_token, other=0.0))
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=is_token[None, :] & (rows < N)[:, None])


@launched
@triton.jit
def _int8_experts_kernel(
    q_ptr,
    token_scales_ptr,
    codes_ptr,
    scales_ptr,
    order_ptr,
    counts_ptr,
    y_ptr,
    PAIRS_PER_ROW,
    N,
    E,
    K,
    ACTIVATE: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute the same as `_packed_experts_kernel`, for int8 tokens and weights."""
    follow(OVERLAP)
    expert, pair, is_pair = load_pairs(order_ptr, counts_ptr, E, SORTED, BLOCK_E, TOKENS)
    if expert < E:
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        token = (pair // PAIRS_PER_ROW).to(tl.int64)
        first = expert.to(tl.int64) * (2 * N if ACTIVATE else N) + rows % N
        q_at = q_ptr + token[None, :] * K
        token_scales = tl.load(token_scales_ptr + token, mask=is_pair, other=0.0)
        total = _exact_product(q_at, is_pair[None, :], codes_ptr + first[:, None] * K, K, ROWS, TOKENS, BLOCK_K)
        y = _apply_scales(total, scales_ptr + first, token_scales)
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        if ACTIVATE:
            second = first + N
            total = _exact_product(q_at, is_pair[None, :], codes_ptr + second[:, None] * K, K, ROWS, TOKENS, BLOCK_K)
            y = activate(y, _apply_scales(total, scales_ptr + second, token_scales), dtype)
        at = y_ptr + pair.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(at, y.to(dtype), mask=is_pair[None, :] & (rows < N)[:, None])


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    (count, length), num_rows = x.shape, codes.shape[0]
    y = torch.empty(count, num_rows, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    q, token_scales = quantize(x, "int8")
    sizes = plan(count)
    grid = ceil_div(count, sizes["TOKENS"]), ceil_div(num_rows, sizes["ROWS"])
    tensors = q, token_scales, codes.contiguous(), scales.contiguous(), y if bias is None else bias.contiguous(), y
    _int8_kernel[grid](
        *tensors, count, num_rows, length, HAS_BIAS=bias is not None, enable_fp_fusion=False, **sizes, **overlap(x)
    )
    return y


def experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel() or not ids.numel():
        return y.zero_()
    ids = ids.contiguous()
    routing = route_by_token(ids) if len(x) <= FEW_TOKENS else route_by_expert(ids, len(gate_up))
    hidden, parts = (
        torch.empty(ids.numel(), n, dtype=x.dtype, device=x.device) for n in (gate_up.shape[1] // 2, x.shape[1])
    )
    sizes = plan(ceil_div(ids.numel(), len(gate_up)))
    gate_up_sizes = sizes | {"TOKENS": min(64, sizes["TOKENS"])}  # two accumulators, gate and up
    _launch(x, gate_up, gate_up_scales, hidden, routing, gate_up_sizes, pairs_per_row=ids.shape[1], is_activated=True)
    _launch(hidden, down, down_scales, parts, routing, sizes, pairs_per_row=1, is_activated=False)
    combine(parts, weights.float().contiguous(), y)
    return y


def _launch(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    y: Tensor,
    routing: Routing,
    sizes: dict[str, Any],
    *,
    pairs_per_row: int,
    is_activated: bool,
) -> None:
    q, token_scales = quantize(x, "int8")
    _int8_experts_kernel[launch_grid(routing, len(codes), y.shape[1], sizes)](
        q,
        token_scales,
        codes.contiguous(),
        scales.contiguous(),
        routing[0],
        routing[1],
        y,
        pairs_per_row,
        y.shape[1],
        len(codes),
        x.shape[1],
        ACTIVATE=is_activated,
        SORTED=routing[2],
        BLOCK_E=power_of_2(len(codes)),
        enable_fp_fusion=False,
        **sizes,
        **overlap(x),
    )


def plan(count: int) -> dict[str, int]:
    """Return tile sizes by the number of tokens, for experts by the tokens per expert."""
    if is_interpreting():
        return {"ROWS": 32, "TOKENS": 16, "BLOCK_K": 64}
    if count <= 16:
        return {"ROWS": 64, "TOKENS": 16, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}
    if count <= 64:
        return {"ROWS": 64, "TOKENS": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 5}
    return {"ROWS": 128, "TOKENS": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4}
