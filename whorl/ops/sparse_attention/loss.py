"""The indexer's loss for training: `kl.py` tied to autograd, computed once, also under activation checkpointing."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kl_torch_npu
from .indexer import chunks, full_bounds
from .kl import dense_indexer_kl, dense_indexer_target, indexer_kl, indexer_target

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # loss [T] or [1], dq, dk, dweights
Reduction = Literal["mean", "sum"]
When = Literal["forward", "backward"]
Reduce = Callable[[Tensor], Tensor]


class _LossWithGradients(torch.autograd.Function):
    """`compute(*tensors)` gives a loss and its gradients by the first three tensors, together."""

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
    total = loss.sum() * factor
    if log is not None:
        log += total
    return total.to(torch.promote_types(total.dtype, torch.float32))


def _factor(name: str, coefficient: float, reduction: str, when: str, num_queries: int, log: Tensor | None) -> float:
    """What the sum over queries is multiplied by."""
    for what, found, options in (
        ("reduction", reduction, ("mean", "sum")),
        ("when", when, ("forward", "backward")),
    ):
        if found not in options:
            raise ValueError(f"{name}: {what} is {found!r}, expected one of {', '.join(options)}")
    if log is not None and (log.numel() != 1 or log.requires_grad):
        raise ValueError(f"{name}: log is {list(log.shape)}, expected one element without gradient")
    return coefficient / max(1, num_queries) if reduction == "mean" else coefficient


def _check_sizes(name: str, q: Tensor, k: Tensor, main_q: Tensor, main_k: Tensor) -> None:
    if q.shape[:1] + k.shape[:1] != main_q.shape[:1] + main_k.shape[:1]:
        raise ValueError(
            f"{name}: q and k are of {len(q)} queries and {len(k)} keys, main_q and main_k of {len(main_q)} and "
            f"{len(main_k)}, expected the same"
        )


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
    """coefficient * mean or sum over queries of KL(main attention || indexer), both over the selected keys.

    q [T, HI, D], k [S, D], weights [T, HI]: the indexer's, and all that gets a gradient; indices [T, K]: its choice.
    main_q [T, H, D'], main_k [S, 1, D'], main_lse [T, H], scale: the attention's, as `indexer_target` takes them; no
    gradient reaches them. The heads are summed, then normalised once over the selected keys.

    reduction: "mean" divides by T, empty queries included; to divide by something else (valid tokens, micro-batches,
    ranks that hold the other queries) take "sum" and put it into the coefficient, or multiply the loss by it. when:
    "forward" gives the loss at once and keeps the gradients until backward. "backward" is for activation
    checkpointing: the forward, which runs twice there, returns 0, and backward computes everything once. log: one
    fp32 element, to which the loss is added when it is known. reduce_target: called with this rank's head sum [T, K],
    for tensor parallelism to add those of the other ranks. deterministic: see `indexer_kl`.
    """
    _check_sizes("indexer_kl_loss", q, k, main_q, main_k)
    factor = _factor("indexer_kl_loss", coefficient, reduction, when, q.shape[0], log)

    def compute(
        q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, main_q: Tensor, main_k: Tensor, lse: Tensor
    ) -> Results:
        given = (q, k, weights, indices, main_q, main_k, lse)
        if reduce_target is None and not deterministic and kl_torch_npu.takes(*given):
            return kl_torch_npu.gradients(*given, scale, factor)
        target = indexer_target(main_q, main_k, indices, lse, scale)
        target = target if reduce_target is None else reduce_target(target)
        return indexer_kl(q, k, weights, indices, target, grad_scale=factor, deterministic=deterministic)

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
    """`indexer_kl_loss` over every visible key: for the warm-up stage, where attention is dense.

    main_k: [S, HK, D'], HK key heads; bounds as in `index_scores`; the rest as in `indexer_kl_loss`. Queries go
    through in chunks: no [T, S] matrix is whole in memory. `reduce_target` is called for each chunk.
    """
    _check_sizes("dense_indexer_kl_loss", q, k, main_q, main_k)
    factor = _factor("dense_indexer_kl_loss", coefficient, reduction, when, q.shape[0], log)

    is_causal = ends is None

    def compute(
        q: Tensor, k: Tensor, weights: Tensor, main_q: Tensor, main_k: Tensor, lse: Tensor, *bounds: Tensor
    ) -> Results:
        given = (q, k, weights, main_q, main_k, lse)
        if reduce_target is None and is_causal and kl_torch_npu.takes_dense(*given):
            return kl_torch_npu.dense_gradients(*given, scale, factor)
        starts, ends, *positions = bounds
        parts, dk = [], torch.zeros(k.shape, dtype=lse.dtype, device=k.device)
        for rows in chunks(q.shape[0], k.shape[0]):
            limits = (starts[rows], ends[rows], *positions)
            target = dense_indexer_target(main_q[rows], main_k, lse[rows], scale, *limits)
            target = target if reduce_target is None else reduce_target(target)
            loss, dq, more, dweights = dense_indexer_kl(q[rows], k, weights[rows], target, *limits, grad_scale=factor)
            dk += more
            parts.append((loss, dq, dweights))
        if not parts:
            return q.new_zeros(0, dtype=lse.dtype), torch.zeros_like(q), dk, torch.zeros_like(weights)
        loss, dq, dweights = (torch.cat(x) for x in zip(*parts, strict=True))
        return loss, dq, dk, dweights

    bounds = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    positions = () if key_positions is None else (key_positions,)
    main = (main_q.detach(), main_k.detach(), main_lse.detach())
    return _LossWithGradients.apply(compute, when, factor, log, q, k, weights, *main, *bounds, *positions)
