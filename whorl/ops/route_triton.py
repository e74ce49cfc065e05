"""The gradient of routing, a token a program; the choice itself is made in moe_triton.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._rows import power_of_2
from .linear_triton import unit_stride


@triton.jit
def _score(logits, peak, total, SOFTMAX: tl.constexpr):
    return tl.div_rn(tl.exp(logits - peak), total) if SOFTMAX else tl.div_rn(1.0, 1 + tl.exp(-logits))


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
    """One token: the gradients of its slots, then of all its logits."""
    row = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits_ptr += row * stride
    logits = tl.load(logits_ptr + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    peak = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    scores = _score(logits, peak, total, SOFTMAX)
    is_slot = slots < K
    ids = tl.load(ids_ptr + row * K + slots, mask=is_slot, other=0)
    chosen = tl.load(logits_ptr + ids, mask=is_slot, other=float("-inf")).to(tl.float32)
    chosen = tl.where(is_slot, _score(chosen, peak, total, SOFTMAX), 0.0)
    grads = tl.load(dweights_ptr + row * K + slots, mask=is_slot, other=0.0).to(tl.float32) * scale
    if RENORMALIZE:
        found = tl.sum(chosen, 0)
        least = tl.maximum(found, 1e-20)
        apart = tl.zeros((BLOCK_K,), tl.float32)
        for slot in range(K):  # differences first: where all are alike the gradient is exactly 0
            share = tl.div_rn(tl.sum(tl.where(slots == slot, chosen, 0.0), 0), least)
            apart += share * (grads - tl.sum(tl.where(slots == slot, grads, 0.0), 0))
        grads = tl.where(found >= 1e-20, apart, grads) / least
    grads = tl.where(is_slot, grads, 0.0)
    dscores = tl.zeros((BLOCK_E,), tl.float32)
    for slot in range(K):
        expert = tl.load(ids_ptr + row * K + slot)
        dscores += tl.where(experts == expert, tl.sum(tl.where(slots == slot, grads, 0.0), 0), 0.0)
    inner = tl.sum(grads * chosen, 0) if SOFTMAX else dscores * scores
    dlogits = scores * (dscores - inner)
    tl.store(dlogits_ptr + row * E + experts, dlogits.to(dlogits_ptr.dtype.element_ty), mask=experts < E)


def backward(dweights: Tensor, logits: Tensor, ids: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    logits = unit_stride(logits)
    (count, experts), k = logits.shape, ids.shape[1]
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if count:
        _route_backward_kernel[(count,)](
            dweights.contiguous(),
            logits,
            ids.contiguous(),
            dlogits,
            logits.stride(0),
            float(scale),
            experts,
            K=k,
            SOFTMAX=scoring == "softmax",
            RENORMALIZE=renormalize,
            BLOCK_E=power_of_2(experts),
            BLOCK_K=power_of_2(k),
            num_warps=1 if experts <= 256 else 4,
        )
    return dlogits
