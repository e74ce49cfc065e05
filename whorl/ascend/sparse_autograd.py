"""Gradients of the indexer's values and of sparse attention, as torch_npu's autograd has them."""

from typing import Any

import torch
from torch import Tensor

from whorl.ops import sparse_attention
from whorl.ops.indexer import lightning_indexer
from whorl.ops.indexer.bounds import chunks
from whorl.ops.indexer.kl import gathered

from .sequences import Parts, ascending, bounds, by_query, joined, statistics

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]  # query, key, value and both rotary parts


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Indexer(torch.autograd.Function):
    """Indices and values of every sequence; the values are differentiable, the choice held."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weights: Tensor, parts: Parts, count: int, mode: int
    ) -> tuple[Tensor, Tensor]:
        shape = (*query.shape[:-2], 1, count)
        indices, values = query.new_full(shape, -1, dtype=torch.int32), query.new_zeros(shape)
        for mine, keys in parts:
            q, k = query[mine], key[keys][:, 0]
            found = lightning_indexer(q, k, weights[mine], count, *bounds(mode, len(q), len(k), q.device))
            indices[mine], values[mine] = found[0][:, None], found[1][:, None].to(values.dtype)
        ctx.save_for_backward(query, key, weights, indices)
        ctx.mark_non_differentiable(indices)
        ctx.parts = parts
        return indices, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """value = sum over heads of weight * relu(q . k): torch_npu's is npu_lightning_indexer_grad."""
        query, key, weights, indices = ctx.saved_tensors
        dq, dk, dweights = (torch.zeros_like(_wide(x)) for x in (query, key, weights))
        for mine, keys in ctx.parts:
            q, k, factors = (_wide(x) for x in (query[mine], key[keys][:, 0], weights[mine]))
            chosen, dvalues = indices[mine][:, 0], _wide(grads[1][mine][:, 0])
            for rows in chunks(len(q), chosen.shape[1] * (q.shape[1] + q.shape[2])):
                picked, valid = gathered(k, chosen[rows])
                dots = torch.einsum("thd,tkd->thk", q[rows], picked)
                each = torch.where(valid, dvalues[rows], 0)[:, None]
                dweights[mine][rows] = (dots.relu() * each).sum(-1)
                ddots = each * factors[rows].unsqueeze(-1) * (dots > 0)
                dq[mine][rows] = torch.einsum("thk,tkd->thd", ddots, picked)
                shares = torch.einsum("thk,thd->tkd", ddots, q[rows]).flatten(0, 1)
                dk[keys][:, 0].index_add_(0, chosen[rows].clamp_min(0).flatten().long(), shares)
        given = (query, key, weights)
        return *(g.to(x.dtype) for g, x in zip((dq, dk, dweights), given, strict=True)), None, None, None


class Attention(torch.autograd.Function):
    """Attention of every sequence to its listed keys, with the softmax's max and sum where they are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        indices: Tensor,
        scale: float,
        mode: int,
        with_statistics: bool,
        parts: Parts,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = joined(query, query_rope), joined(key, key_rope)
        out = torch.zeros_like(query)
        tops, sums = (query.new_zeros(query.shape[:-1], dtype=torch.float32) for _ in range(2))
        for mine, keys in parts:
            listed = ascending(indices[mine], mode, len(k[keys]))
            out[mine], lse = sparse_attention(q[mine], k[keys], listed, scale, value_dim=query.shape[-1])
            if with_statistics:
                tops[mine] = _tops(q[mine], k[keys], listed, scale)
                sums[mine] = torch.exp(lse - tops[mine])
        top, total = (statistics(x) if with_statistics else x.new_empty(0) for x in (tops, sums))
        ctx.save_for_backward(query, key, value, query_rope, key_rope, indices, out, top, total)
        ctx.mark_non_differentiable(top, total)
        ctx.more = (scale, mode, parts)
        return out, top, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_rope, key_rope, indices, *results = ctx.saved_tensors
        inputs = (query, key, value, query_rope, key_rope)
        dq, dk, dv, dq_rope, dk_rope = attention_gradients(inputs, indices, grads[0], tuple(results), *ctx.more)
        if value is None:  # key was both
            dk = dk + dv
        found = zip((dq, dk, dv, dq_rope, dk_rope), inputs, strict=True)
        return *(None if x is None else g.to(x.dtype) for g, x in found), None, None, None, None, None


def attention_gradients(
    inputs: Inputs,
    indices: Tensor,
    grad: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    scale: float,
    mode: int | None,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of query, key, value and both rotary parts, in the dtype of accumulation; `results` are those of the forward."""
    query, key, _, query_rope, key_rope = inputs
    out, tops, sums = results[0], by_query(results[1]), by_query(results[2])
    q, k, dim = joined(query, query_rope), joined(key, key_rope), query.shape[-1]
    dq, dk, dv = (torch.zeros_like(_wide(x)) for x in (q, k, key))
    for mine, keys in parts:
        listed = ascending(indices[mine], mode, len(k[keys]))
        wide = (_wide(q[mine]), _wide(k[keys][:, 0]), _wide(grad[mine]), _wide(out[mine]), tops[mine], sums[mine])
        dq[mine] = _add_gradients(*wide, listed, scale, dk[keys][:, 0], dv[keys][:, 0])
    return dq[..., :dim], dk[..., :dim], dv, dq[..., dim:], dk[..., dim:]


def _tops(q: Tensor, k: Tensor, indices: Tensor, scale: float) -> Tensor:
    """The highest logit of each query and head; 0 where there is no key."""
    found = q.new_zeros(q.shape[:2], dtype=torch.float32)
    for rows in chunks(len(q), indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys, valid = gathered(k[:, 0].float(), indices[rows])
        logits = torch.einsum("thd,tkd->thk", q[rows].float(), keys) * scale
        top = torch.where(valid[:, None], logits, -torch.inf).amax(-1)
        found[rows] = torch.where(valid.any(-1)[:, None], top, 0)
    return found


def _add_gradients(
    q: Tensor,
    k: Tensor,
    grad: Tensor,
    out: Tensor,
    tops: Tensor,
    sums: Tensor,
    indices: Tensor,
    scale: float,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """dq of one sequence; its keys' shares are added to dk, their shares as values to dv. Some queries at a time."""
    dq, dim = torch.empty_like(q), grad.shape[2]
    for rows in chunks(len(q), indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys, valid = gathered(k, indices[rows])
        logits = torch.einsum("thd,tkd->thk", q[rows], keys) * scale
        weights = torch.exp(logits - tops[rows].unsqueeze(-1)) / sums[rows].unsqueeze(-1)
        weights = torch.where(valid[:, None], weights, 0)
        delta = (grad[rows] * out[rows]).sum(-1, keepdim=True)
        dlogits = weights * (torch.einsum("thd,tkd->thk", grad[rows], keys[..., :dim]) - delta) * scale
        dq[rows] = torch.einsum("thk,tkd->thd", dlogits, keys)
        at = indices[rows].clamp_min(0).flatten().long()
        for total, each, heads in ((dk, dlogits, q[rows]), (dv, weights, grad[rows])):
            total.index_add_(0, at, torch.einsum("thk,thd->tkd", each, heads).flatten(0, 1))
    return dq
