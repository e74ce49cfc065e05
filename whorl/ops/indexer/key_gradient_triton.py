# mypy: allow-untyped-defs
"""The gradient of the indexer's keys, added in a fixed order; and code that all kernels of the loss share."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2
from ..linear_triton import dot
from .scores_triton import key_block, row_strides


def split_dim(dim: int) -> tuple[int, int]:
    """Return the largest power of two within dim, and one that covers the remaining channels; both at least 16."""
    main = power_of_2(dim) if power_of_2(dim) == dim or dim < 16 else power_of_2(dim) // 2
    return max(16, main), max(16, power_of_2(dim - main)) if dim > main else 16


def lift(dtype: torch.dtype) -> float:
    """Return the factor of score gradients before rounding: they are far below 1, and fp16 would lose them."""
    return 1024.0 if dtype == torch.float16 else 1.0


def gradient_plan(tile: str, q: Tensor, *, stages: int) -> dict[str, Any]:
    """Return the head sizes, the keys per tile under the name `tile`, and the launch options of a gradient kernel."""
    heads, dim = q.shape[1:]
    sizes: dict[str, Any] = {"HI": heads, "D": dim, "LIFT": lift(q.dtype), "WIDEN": is_interpreting()}
    sizes |= {"BLOCK_H": max(16, power_of_2(heads)), "BLOCK_D": max(16, power_of_2(dim))}
    if is_interpreting():
        return {**sizes, tile: 16}
    if q.element_size() == 4 or sizes["BLOCK_H"] * sizes["BLOCK_D"] > 64 * 128:
        return {**sizes, tile: 16, "num_warps": 8, "num_stages": 1}
    return {**sizes, tile: 64, "num_warps": 4, "num_stages": stages}


@triton.jit
def load_query(
    q_ptr, weights_ptr, token, q_stride_t, q_stride_h, weights_stride, HI: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load one query; return its heads, channels, the mask of those that exist, the query and its weights."""
    heads, channels = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (heads < HI)[:, None] & (channels < D)[None, :]
    q = tl.load(q_ptr + token * q_stride_t + heads[:, None] * q_stride_h + channels[None, :], mask=inside, other=0.0)
    weights = tl.load(weights_ptr + token * weights_stride + heads, mask=heads < HI, other=0.0).to(tl.float32)
    return heads, channels, inside, q, weights


@triton.jit
def store_query_gradients(
    dq_ptr, dweights_ptr, dq, dweights, token, heads, channels, inside, grad_scale, HI: tl.constexpr, D: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of one query. dq is multiplied by LIFT; dweights [keys, heads] is summed over keys here."""
    dq *= grad_scale / LIFT
    dq_at = dq_ptr + (token * HI + heads)[:, None] * D + channels[None, :]
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=inside)
    sums = tl.sum(dweights, 0) * grad_scale
    tl.store(dweights_ptr + token * HI + heads, sums.to(dweights_ptr.dtype.element_ty), mask=heads < HI)


@triton.jit
def _dense_dk_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    dscores_ptr,
    starts_ptr,
    ends_ptr,
    positions_ptr,
    dk_ptr,
    q_stride_t,
    q_stride_h,
    k_stride,
    weights_stride,
    dscores_stride,
    grad_scale,
    T,
    S,
    HI: tl.constexpr,
    D: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    LIFT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dk of a block of keys, adding over all queries one by one, so that the order is fixed."""
    keys, exists, _, lowest, highest = key_block(positions_ptr, tl.program_id(0) * BLOCK_S, S, BLOCK_S, HAS_POSITIONS)
    heads, channels = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (heads < HI)[:, None] & (channels < D)[None, :]
    owned = exists[:, None] & (channels < D)[None, :]
    k = tl.load(k_ptr + keys.to(tl.int64)[:, None] * k_stride + channels[None, :], mask=owned, other=0.0)
    dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for group in range(0, T, GROUP):
        is_seen = True
        if HAS_BOUNDS:
            tokens = group + tl.arange(0, GROUP)
            last_end = tl.max(tl.load(ends_ptr + tokens, mask=tokens < T, other=-2147483648), 0)
            first_start = tl.min(tl.load(starts_ptr + tokens, mask=tokens < T, other=2147483647), 0)
            is_seen = (lowest < last_end) & (highest >= first_start)
        if is_seen:
            for token in tl.range(group, tl.minimum(group + GROUP, T)):
                row = tl.zeros((), tl.int64) + token
                q_at = q_ptr + row * q_stride_t + heads[:, None] * q_stride_h + channels[None, :]
                q = tl.load(q_at, mask=inside, other=0.0)
                weights = tl.load(weights_ptr + row * weights_stride + heads, mask=heads < HI, other=0.0)
                dscores = tl.load(dscores_ptr + row * dscores_stride + keys, mask=exists, other=0.0)
                dots = dot(k, tl.trans(q), tl.zeros((BLOCK_S, BLOCK_H), tl.float32), WIDEN)
                ddots = (dscores * LIFT)[:, None] * weights.to(tl.float32)[None, :]
                dk = dot(tl.where(dots > 0, ddots, 0.0).to(q.dtype), q, dk, WIDEN)
    at = dk_ptr + keys.to(tl.int64)[:, None] * D + channels[None, :]
    before = tl.load(at, mask=owned, other=0.0)
    tl.store(at, before + dk * (grad_scale / LIFT), mask=owned)


def add_dk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    dscores: Tensor,
    bounds: tuple[Tensor, Tensor, Tensor | None] | None,
    dk: Tensor,
    grad_scale: float,
) -> None:
    """Add to dk [S, D] fp32 the contributions of these queries, whose score gradients are `dscores` [T, S]."""
    starts, ends, positions = bounds or (dscores, dscores, None)
    plan = gradient_plan("BLOCK_S", q, stages=2)
    _dense_dk_kernel[(ceil_div(k.shape[0], plan["BLOCK_S"]),)](
        q,
        k,
        weights,
        dscores,
        starts,
        ends,
        starts if positions is None else positions,
        dk,
        *row_strides(q, k, weights),
        dscores.stride(0),
        grad_scale,
        q.shape[0],
        k.shape[0],
        HAS_BOUNDS=bounds is not None,
        HAS_POSITIONS=positions is not None,
        GROUP=16,
        **plan,
    )
