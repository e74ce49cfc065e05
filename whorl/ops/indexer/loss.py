"""The indexer's loss with autograd. Loss and gradients are computed once, even under activation checkpointing."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl.device import unavailable

from .. import _torch_npu
from . import kl_torch_npu
from .kl import Results, gradients_over_ranks, is_causal_choice

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


def _factor(coefficient: float, reduction: str, when: str, num_queries: int, log: Tensor | None) -> float:
    """Return the factor of the sum over queries. Raises ValueError for options that do not fit."""
    for option, value, choices in (
        ("reduction", reduction, ("mean", "sum")),
        ("when", when, ("forward", "backward")),
    ):
        if value not in choices:
            raise ValueError(f"indexer_kl_loss: {option} is {value!r}, expected one of {', '.join(choices)}")
    if log is not None and (log.numel() != 1 or log.requires_grad):
        raise ValueError(f"indexer_kl_loss: log is {list(log.shape)}, expected one element that does not require grad")
    return coefficient / max(1, num_queries) if reduction == "mean" else coefficient


def _is_causal(indices: Tensor | None, k: Tensor, **tensors: Any) -> bool:
    """Return whether indices are known to be causal with no row empty, as the fused torch_npu operator requires.

    The check waits for the device, so it runs only where that operator takes everything else; elsewhere the answer is
    False.
    """
    if indices is None or unavailable("torch_npu", k.device.type) is not None:
        return False
    if kl_torch_npu.reason(k=k, indices=indices, causal=True, **tensors) is not None:
        return False
    return bool(_torch_npu.on_host(is_causal_choice(indices, k.shape[0]))[0])


def indexer_kl_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None,
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
    deterministic: bool = False,
) -> Tensor:
    """Return coefficient * (mean or sum over queries of KL(main attention || indexer)).

    q [T, HI, D], k [S, D] and weights [T, HI] are the indexer's and the only tensors that get a gradient. indices
    [T, K] is its selection, over which the loss is. None means every visible key, for the warm-up stage, where
    attention is dense: starts, ends and key_positions are then those of `lightning_indexer`, and queries are processed
    in chunks, so that no [T, S] matrix is ever allocated. main_q [T, H, D'], main_k [S, 1, D'] (without indices
    [S, HK, D'], HK key heads), main_lse [T, H] fp32 (as `sparse_attention` returns it) and scale are the attention's;
    they get no gradient. The attention of all heads is summed, and the sum is normalised over the keys. Returns a
    scalar tensor, fp32 or wider. Raises ValueError when shapes, dtypes or options do not fit.

    reduction: "mean" divides by T, empty queries included; to divide by something else (valid tokens, micro-batches,
    ranks that hold the other queries) use "sum" and put the divisor into the coefficient. when: "forward" computes the
    loss at once and keeps the gradients until backward. "backward" is for activation checkpointing: the forward, which
    runs twice there, returns 0, and backward computes everything once. log: one fp32 element, to which the loss is
    added once it is computed. reduce_target: called with this rank's sum over heads [T, K] or, without indices, that of
    each chunk of queries, returns the sum over all tensor-parallel ranks (an all-reduce). deterministic: the gradient
    of k is added up in a fixed order, at the cost of a pass over all keys.

        ops.indexer_kl_loss(q, k, weights, indices, main_q, main_k, main_lse, scale=192**-0.5).backward()
    """
    if (len(q), len(k)) != (len(main_q), len(main_k)):
        raise ValueError(
            f"indexer_kl_loss: q and k have {len(q)} queries and {len(k)} keys, main_q and main_k {len(main_q)} and "
            f"{len(main_k)}, expected the same"
        )
    factor = _factor(coefficient, reduction, when, len(q), log)
    options: dict[str, Any] = {"scale": scale, "grad_scale": factor, "deterministic": deterministic}

    def compute(*tensors: Any) -> Results:
        q, k, _, indices, main_q, main_k, *_ = tensors
        causal = reduce_target is None and _is_causal(
            indices, k, q=q, main_q=main_q, main_k=main_k, deterministic=deterministic
        )
        return gradients_over_ranks(reduce_target, *tensors, causal=causal, **options)

    main = (main_q.detach(), main_k.detach(), main_lse.detach())
    tensors = (q, k, weights, indices, *main, starts, ends, key_positions)
    loss: Tensor = _LossWithGradients.apply(compute, when, factor, log, *tensors)
    return loss
