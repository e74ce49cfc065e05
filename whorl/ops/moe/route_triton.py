# mypy: allow-untyped-defs
"""Routing in Triton, one program per token: the choice of experts, and the gradient of their weights."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched, prepare
from .._overlap_triton import begin, follow, overlap_level, overlap_options
from .._rows import empty_like, power_of_2, unit_stride

LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # a key below that of -inf


@triton.jit
def _sort_keys(values):
    """Return int32 in the order of the values: a warp finds the maximum of such integers in one instruction."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _top_key(keys, ids):
    """Return the highest key of a 2-D block of `_sort_keys` and its id, among equals the lowest."""
    best = tl.max(tl.max(keys, 1), 0)
    return best, tl.min(tl.min(tl.where(keys == best, ids, 0x7FFFFFFF), 1), 0)


@launched
@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    stride,
    scale,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Route one token; its experts form a tile [groups, experts per group]."""
    begin(OVERLAP)
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    ids = group * SIZE + member
    is_real = (group < GROUPS) & (member < SIZE)
    logits = tl.load(logits_ptr + row * stride + ids, mask=is_real, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = 1 / (1 + tl.exp(-logits))
    ranking = scores
    if HAS_BIAS:
        ranking += tl.load(bias_ptr + ids, mask=is_real, other=0.0).to(tl.float32)
    ranking = tl.where(is_real, ranking, float("-inf"))
    if GROUPS > 1:
        best = tl.max(ranking, 1)[:, None]
        if HAS_BIAS:  # a group ranks by the sum of its best two experts
            first = tl.min(tl.where(ranking == best, member, BLOCK_S), 1)[:, None]
            second = tl.max(tl.where(member == first, float("-inf"), ranking), 1)[:, None]
            best = best + (second if SIZE > 1 else 0.0)
        best = tl.where(group < GROUPS, best, float("-inf"))
        is_kept = group < 0
        keys = _sort_keys(best)
        for _ in range(TOP_GROUPS):
            winner = _top_key(keys, group)[1]
            is_kept = is_kept | (group == winner)
            keys = tl.where(group == winner, LOWEST, keys)
        ranking = tl.where(is_kept, ranking, float("-inf"))
    choice = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    total = 0.0
    keys = _sort_keys(ranking)
    for i in tl.static_range(K):
        key, winner = _top_key(keys, ids)
        if HAS_BIAS:
            weight = tl.sum(tl.sum(tl.where(ids == winner, scores, 0.0), 1), 0)
        else:  # scores are never negative, so a key has their bits
            weight = key.to(tl.float32, bitcast=True)
        weights = tl.where(choice == i, weight, weights)
        chosen = tl.where(choice == i, winner, chosen)
        keys = tl.where(ids == winner, LOWEST, keys)
        total += weight
    if RENORMALIZE:
        weights = weights / tl.maximum(total, 1e-20)
    tl.store(weights_ptr + row * K + choice, weights * scale, mask=choice < K)
    tl.store(ids_ptr + row * K + choice, chosen, mask=choice < K)


def forward(logits: Tensor, k: int, bias: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    logits = unit_stride(logits)
    weights = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
    if ids.numel():
        level = overlap_level(logits)
        launch = _forward_launch(logits.shape, logits.stride(0), k, bias is not None, level, **options)
        launch(logits, logits if bias is None else bias.contiguous(), weights, ids)
    return weights, ids


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    shape: torch.Size,
    stride: int,
    k: int,
    has_bias: bool,
    level: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> Callable[..., None]:
    """Return the launch for logits of this shape and stride. level: `overlap_level`."""
    count, experts = shape
    return prepare(
        _route_kernel,
        (count,),
        *(stride, float(scale)),
        SIZE=experts // num_groups,
        GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        K=k,
        HAS_BIAS=has_bias,
        SOFTMAX=scoring == "softmax",
        RENORMALIZE=renormalize,
        BLOCK_G=power_of_2(num_groups),
        BLOCK_S=power_of_2(experts // num_groups),
        BLOCK_K=power_of_2(k),
        num_warps=1,
        **overlap_options(level),
    )


@triton.jit
def _score(logits, peak, total, SOFTMAX: tl.constexpr):
    return tl.div_rn(tl.exp(logits - peak), total) if SOFTMAX else tl.div_rn(1.0, 1 + tl.exp(-logits))


@launched
@triton.jit
def _route_backward_kernel(
    dweights_ptr,
    logits_ptr,
    ids_ptr,
    dlogits_ptr,
    stride,
    scale,
    E,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one token's gradients: of the scores of its choices first, then of all its logits."""
    row = tl.program_id(0).to(tl.int64)
    experts, choices = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits_ptr += row * stride
    logits = tl.load(logits_ptr + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    peak = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    scores = _score(logits, peak, total, SOFTMAX)
    is_choice = choices < K
    ids = tl.load(ids_ptr + row * K + choices, mask=is_choice, other=0)
    chosen = tl.load(logits_ptr + ids, mask=is_choice, other=float("-inf")).to(tl.float32)
    chosen = tl.where(is_choice, _score(chosen, peak, total, SOFTMAX), 0.0)
    grads = tl.load(dweights_ptr + row * K + choices, mask=is_choice, other=0.0).to(tl.float32) * scale
    if RENORMALIZE:
        chosen_total = tl.sum(chosen, 0)
        divisor = tl.maximum(chosen_total, 1e-20)
        differences = tl.zeros((BLOCK_K,), tl.float32)
        for choice in range(K):  # subtract before multiplying: equal gradients give exactly 0
            share = tl.div_rn(tl.sum(tl.where(choices == choice, chosen, 0.0), 0), divisor)
            differences += share * (grads - tl.sum(tl.where(choices == choice, grads, 0.0), 0))
        grads = tl.where(chosen_total >= 1e-20, differences, grads) / divisor
    grads = tl.where(is_choice, grads, 0.0)
    dscores = tl.zeros((BLOCK_E,), tl.float32)
    for choice in range(K):
        expert = tl.load(ids_ptr + row * K + choice)
        dscores += tl.where(experts == expert, tl.sum(tl.where(choices == choice, grads, 0.0), 0), 0.0)
    inner = tl.sum(grads * chosen, 0) if SOFTMAX else dscores * scores
    dlogits = scores * (dscores - inner)
    tl.store(dlogits_ptr + row * E + experts, dlogits.to(dlogits_ptr.dtype.element_ty), mask=experts < E)


def backward(dweights: Tensor, logits: Tensor, ids: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    logits = unit_stride(logits)
    dlogits = empty_like(logits)
    if dlogits.numel():
        launch = _backward_launch(logits.shape, logits.stride(0), ids.shape[1], scoring, renormalize, scale)
        launch(dweights.contiguous(), logits, ids.contiguous(), dlogits)
    return dlogits


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    shape: torch.Size, stride: int, k: int, scoring: str, renormalize: bool, scale: float
) -> Callable[..., None]:
    """Return the launch for logits of this shape and stride, and k choices."""
    count, experts = shape
    return prepare(
        _route_backward_kernel,
        (count,),
        *(stride, float(scale), experts),
        K=k,
        SOFTMAX=scoring == "softmax",
        RENORMALIZE=renormalize,
        BLOCK_E=power_of_2(experts),
        BLOCK_K=power_of_2(k),
        num_warps=1 if experts <= 256 else 4,
    )
