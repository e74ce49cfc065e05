"""The indexer's loss with autograd. Loss and gradients are computed once, even under activation checkpointing."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl.device import unavailable

from .. import _torch_npu
from . import kl_torch_npu
from .bounds import check_bounds, chunks, full_bounds
from .dense_kl import dense_indexer_kl, dense_indexer_target
from .kl import indexer_kl, indexer_target
from .kl_gradients import check_sizes, dense_indexer_kl_gradients, indexer_kl_gradients, is_causal_choice

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # loss [T] or [1], dq, dk, dweights
Reduction = Literal["mean", "sum"]
When = Literal["forward", "backward"]
Reduce = Callable[[Tensor], Tensor]  # an all-reduce of the target


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients are computed together with it.

    compute(*tensors) returns the loss of each query and the gradients of factor * its sum with respect to the first
    three tensors; when says whether the forward or the backward calls it. The total is added to `log`, if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Results], when: When, factor: float, log: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.compute, ctx.when, ctx.factor, ctx.log = compute, when, factor, log
        ctx.num_inputs, ctx.dtypes = len(tensors), [t.dtype for t in tensors[:3]]
        if when == "backward":
            ctx.save_for_backward(*tensors)
            return tensors[0].new_zeros((), dtype=torch.float32)
        loss, *gradients = compute(*tensors)
        ctx.save_for_backward(*gradients)
        return _total(loss, factor, log)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = list(ctx.saved_tensors)
        if ctx.when == "backward":
            loss, *gradients = ctx.compute(*gradients)
            _total(loss, ctx.factor, ctx.log)
        gradients = [(g * grad).to(d) for g, d in zip(gradients, ctx.dtypes, strict=True)]
        return None, None, None, None, *gradients, *(None,) * (ctx.num_inputs - 3)


def _total(loss: Tensor, factor: float, log: Tensor | None) -> Tensor:
    """Return factor * the sum of the loss, fp32 or wider, and add it to `log`."""
    total = loss.sum() * factor
    if log is not None:
        log += total
    return total.to(torch.promote_types(total.dtype, torch.float32))


def _factor(name: str, coefficient: float, reduction: str, when: str, num_queries: int, log: Tensor | None) -> float:
    """Return the factor of the sum over queries. Raises ValueError for options that do not fit."""
    for option, value, choices in (
        ("reduction", reduction, ("mean", "sum")),
        ("when", when, ("forward", "backward")),
    ):
        if value not in choices:
            raise ValueError(f"{name}: {option} is {value!r}, expected one of {', '.join(choices)}")
    if log is not None and (log.numel() != 1 or log.requires_grad):
        raise ValueError(f"{name}: log is {list(log.shape)}, expected one element that does not require grad")
    return coefficient / max(1, num_queries) if reduction == "mean" else coefficient


def _is_causal(q: Tensor, k: Tensor, indices: Tensor, main_q: Tensor, main_k: Tensor, deterministic: bool) -> bool:
    """Return whether indices are known to be causal with no row empty, as the fused torch_npu operator requires.

    The check waits for the device, so it runs only where that operator takes everything else; elsewhere the answer is
    False.
    """
    if unavailable("torch_npu", q.device.type) is not None:
        return False
    if kl_torch_npu.reason(q, k, indices, main_q, main_k, True, deterministic) is not None:
        return False
    return bool(_torch_npu.on_host(is_causal_choice(indices, k.shape[0]))[0])


def indexer_kl_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    *,
    scale: float,
    coefficient: float = 1.0,
    reduction: Reduction = "mean",
    when: When = "forward",
    log: Tensor | None = None,
    reduce_target: Reduce | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return coefficient * (mean or sum over queries of KL(main attention || indexer)), over the selected keys.

    q [T, HI, D], k [S, D] and weights [T, HI] are the indexer's and the only tensors that get a gradient; indices
    [T, K] is its selection. main_q [T, H, D'], main_k [S, 1, D'], main_lse [T, H] fp32
    (as `sparse_attention` returns it) and scale are the attention's; they get no gradient. The attention of all heads
    is summed, and the sum is normalised over the selected keys. Returns a scalar tensor, fp32 or wider. Raises
    ValueError when shapes, dtypes or options do not fit.

    reduction: "mean" divides by T, empty queries included; to divide by something else (valid tokens, micro-batches,
    ranks that hold the other queries) use "sum" and put the divisor into the coefficient. when: "forward" computes the
    loss at once and keeps the gradients until backward. "backward" is for activation checkpointing: the forward, which
    runs twice there, returns 0, and backward computes everything once. log: one fp32 element, to which the loss is
    added once it is computed. reduce_target: called with this rank's sum over heads [T, K], returns the sum over all
    tensor-parallel ranks (an all-reduce). deterministic: the gradient of k is added up in a fixed order, at the cost of
    a pass over all keys.

        ops.indexer_kl_loss(q, k, weights, indices, main_q, main_k, main_lse, scale=192**-0.5).backward()
    """
    check_sizes("indexer_kl_loss", q, k, main_q, main_k)
    factor = _factor("indexer_kl_loss", coefficient, reduction, when, q.shape[0], log)

    def compute(
        q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, main_q: Tensor, main_k: Tensor, lse: Tensor
    ) -> Results:
        options: dict[str, Any] = {"grad_scale": factor, "deterministic": deterministic}
        if reduce_target is None:
            tensors = (q, k, weights, indices, main_q, main_k, lse)
            causal = _is_causal(q, k, indices, main_q, main_k, deterministic)
            return indexer_kl_gradients(*tensors, scale=scale, causal=causal, **options)
        target = reduce_target(indexer_target(main_q, main_k, indices, lse, scale))
        return indexer_kl(q, k, weights, indices, target, **options)

    main = (main_q.detach(), main_k.detach(), main_lse.detach())
    return _LossWithGradients.apply(compute, when, factor, log, q, k, weights, indices, *main)


def dense_indexer_kl_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float,
    coefficient: float = 1.0,
    reduction: Reduction = "mean",
    when: When = "forward",
    log: Tensor | None = None,
    reduce_target: Reduce | None = None,
) -> Tensor:
    """Return `indexer_kl_loss` over every visible key, for the warm-up stage, where attention is dense.

    main_k: [S, HK, D'], HK key heads; starts, ends and key_positions are those of `lightning_indexer`, the other
    arguments those of `indexer_kl_loss`. Queries are processed in chunks: no [T, S] matrix is ever allocated.
    `reduce_target` is called once per chunk.

        ops.dense_indexer_kl_loss(q, k, weights, main_q, main_k, main_lse, scale=192**-0.5)
    """
    check_sizes("dense_indexer_kl_loss", q, k, main_q, main_k)
    check_bounds("dense_indexer_kl_loss", q.shape[0], k.shape[0], starts, ends, key_positions)
    factor = _factor("dense_indexer_kl_loss", coefficient, reduction, when, q.shape[0], log)

    def compute(
        q: Tensor, k: Tensor, weights: Tensor, main_q: Tensor, main_k: Tensor, lse: Tensor, *bounds: Tensor
    ) -> Results:
        starts, ends, positions = (*bounds, None, None, None)[:3]
        if reduce_target is None:
            tensors = (q, k, weights, main_q, main_k, lse, starts, ends, positions)
            return dense_indexer_kl_gradients(*tensors, scale=scale, grad_scale=factor)
        starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
        parts, dk = [], torch.zeros(k.shape, dtype=lse.dtype, device=k.device)
        for rows in chunks(q.shape[0], k.shape[0]):
            limits = (starts[rows], ends[rows], positions)
            target = reduce_target(dense_indexer_target(main_q[rows], main_k, lse[rows], scale, *limits))
            loss, dq, chunk_dk, dweights = dense_indexer_kl(
                q[rows], k, weights[rows], target, *limits, grad_scale=factor
            )
            dk += chunk_dk
            parts.append((loss, dq, dweights))
        if not parts:
            return q.new_zeros(0, dtype=lse.dtype), torch.zeros_like(q), dk, torch.zeros_like(weights)
        loss, dq, dweights = (torch.cat(x) for x in zip(*parts, strict=True))
        return loss, dq, dk, dweights

    bounds: tuple[Tensor, ...] = ()
    if ends is not None:
        bounds = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
        bounds = bounds if key_positions is None else (*bounds, key_positions)
    main = (main_q.detach(), main_k.detach(), main_lse.detach())
    return _LossWithGradients.apply(compute, when, factor, log, q, k, weights, *main, *bounds)
