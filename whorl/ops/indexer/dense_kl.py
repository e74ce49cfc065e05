"""The indexer's loss over every visible key, for the warm-up stage, where attention is dense."""

import torch
from torch import Tensor

from .._op import Values, operator
from .bounds import check_bounds, visible_keys, wide_dtype
from .kl import (
    ONE_CALL,
    check_attention,
    check_main_key,
    check_target,
    fake_kl,
    kl_flops,
    round_operand,
    row_divergence,
    triton_target_reason,
)
from .scores import check_indexer, index_scores, triton_reason


def _check_target(q: Tensor, k: Tensor, lse: Tensor, scale: float, **bounds: Tensor | None) -> None:
    check_attention("dense_indexer_target", q, lse)
    check_main_key("dense_indexer_target", "k", k, q, one_head=False)
    check_bounds("dense_indexer_target", q.shape[0], k.shape[0], **bounds)


def _fake_target(q: Tensor, k: Tensor, **_: object) -> Tensor:
    return q.new_empty(q.shape[0], k.shape[0], dtype=wide_dtype(q))


def _target_flops(values: Values) -> int:
    return 2 * values["q"].numel() * values["k"].shape[0]


@operator(
    check=_check_target, forward_only=True, without={"torch_npu": ONE_CALL}, fake=_fake_target, flops=_target_flops
)
def dense_indexer_target(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """Sum dense attention over heads: target[t, s] = sum over h of exp(scale * q[t, h] . k[s, h'] - lse[t, h]).

    q: [T, H, D]; k: [S, HK, D], where head h uses key head h' = h // (H / HK); lse: [T, H] fp32, natural logarithm;
    returns target: [T, S] fp32, 0 where t does not see s. starts, ends and key_positions are those of `index_scores`.
    Call it with one chunk of queries at a time, since the target is large. No gradient.
    """
    wide = wide_dtype(q)
    visible = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
    target = torch.zeros(q.shape[0], k.shape[0], dtype=wide, device=q.device)
    for head in range(q.shape[1]):
        keys = k[:, head // (q.shape[1] // k.shape[1])].to(wide)
        target += torch.exp(q[:, head].to(wide) @ keys.T * scale - lse[:, head, None].to(wide))
    return target.masked_fill(~visible, 0)


dense_indexer_target.impl("triton", "dense_kl_triton:target", accepts=triton_target_reason)


def _check_kl(
    q: Tensor, k: Tensor, weights: Tensor, target: Tensor, grad_scale: float, **bounds: Tensor | None
) -> None:
    check_indexer("dense_indexer_kl", q, k, weights)
    check_target("dense_indexer_kl", target, (q.shape[0], k.shape[0]), q)
    check_bounds("dense_indexer_kl", q.shape[0], k.shape[0], **bounds)


@operator(check=_check_kl, forward_only=True, without={"torch_npu": ONE_CALL}, fake=fake_kl, flops=kl_flops)
def dense_indexer_kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `indexer_kl` over every visible key, for the warm-up stage, one chunk of queries at a time.

    target: [T, S] fp32, 0 where t does not see s; starts, ends and key_positions are those of `index_scores`, the other
    arguments and the results those of `indexer_kl`. Besides the results only two matrices [T, S] are in memory. dk is
    always added up in a fixed order.
    """
    wide = wide_dtype(q)
    valid = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
    scores = index_scores.reference(q, k, weights, starts, ends, key_positions)
    loss, dscores = row_divergence(scores, target, valid)
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    dk, keys = torch.zeros(k.shape, dtype=wide, device=q.device), k.to(wide)
    for head in range(q.shape[1]):
        queries, factors = q[:, head].to(wide), weights[:, head, None].to(wide)
        dots = queries @ keys.T
        ddots = round_operand(dscores * factors * (dots > 0), q.dtype)
        dq[:, head] = (grad_scale * ddots @ keys).to(q.dtype)
        dweights[:, head] = (grad_scale * (dots.relu() * dscores).sum(-1)).to(weights.dtype)
        dk += ddots.T @ queries
    return loss, dq, grad_scale * dk, dweights


dense_indexer_kl.impl("triton", "dense_kl_triton:kl", accepts=triton_reason)
