# mypy: allow-untyped-defs
"""The gradient of the indexer's keys, added in a fixed order; and what all kernels of its loss are planned by."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2
from ..linear_triton import dot
from .scores_triton import key_block, row_strides


def split_dim(dim: int) -> tuple[int, int]:
    """The largest power of two in dim, and one that holds the rest; both at least 16."""
    main = power_of_2(dim) if power_of_2(dim) == dim or dim < 16 else power_of_2(dim) // 2
    return max(16, main), max(16, power_of_2(dim - main)) if dim > main else 16


def lift(dtype: torch.dtype) -> float:
    """Derivatives by the scores are far below 1: fp16 would lose them."""
    return 1024.0 if dtype == torch.float16 else 1.0


def gradient_plan(tile: str, heads: int, dim: int, element_size: int, *, stages: int) -> dict[str, int]:
    """How many keys (`tile` is the kernel's name for them) a program multiplies at a time, and by how many threads."""
    sizes = {"BLOCK_H": max(16, power_of_2(heads)), "BLOCK_D": max(16, power_of_2(dim))}
    if is_interpreting():
        return {**sizes, tile: 16}
    if element_size == 4 or sizes["BLOCK_H"] * sizes["BLOCK_D"] > 64 * 128:
        return {**sizes, tile: 16, "num_warps": 8, "num_stages": 1}
    return {**sizes, tile: 64, "num_warps": 4, "num_stages": stages}


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
    """A block of keys, held, and all queries one after the other: the sum has one order."""
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
    """dk [S, D] fp32 += of these queries, whose derivatives by the scores are `dscores` [T, S]."""
    starts, ends, positions = bounds or (dscores, dscores, None)
    plan = gradient_plan("BLOCK_S", q.shape[1], q.shape[2], q.element_size(), stages=2)
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
        HI=q.shape[1],
        D=q.shape[2],
        HAS_BOUNDS=bounds is not None,
        HAS_POSITIONS=positions is not None,
        GROUP=16,
        LIFT=lift(q.dtype),
        WIDEN=is_interpreting(),
        **plan,
    )
