"""Autograd functions of the indexer's values and of sparse attention, with the gradients that torch_npu has."""

from typing import Any

import torch
from torch import Tensor

from whorl.ops import sparse_attention
from whorl.ops.indexer import lightning_indexer
from whorl.ops.indexer.bounds import chunks
from whorl.ops.indexer.kl import gathered

from .sequences import SequenceIndices, join_rope, key_bounds, sort_indices, to_query_order, to_statistics_order

# query, key, value and both rotary parts
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _wide(x: Tensor) -> Tensor:
    """Return x in the accumulation dtype: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Indexer(torch.autograd.Function):
    """npu_lightning_indexer: return the indices [..., 1, count] and their index scores (values), sequence by sequence.

    The values are differentiable while the indices are held fixed. mode: sparse_mode.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weights: Tensor, sequence_indices: SequenceIndices, count: int, mode: int
    ) -> tuple[Tensor, Tensor]:
        shape = (*query.shape[:-2], 1, count)
        indices, values = query.new_full(shape, -1, dtype=torch.int32), query.new_zeros(shape)
        for queries, keys in sequence_indices:
            q, k = query[queries], key[keys][:, 0]
            best, scores = lightning_indexer(q, k, weights[queries], count, *key_bounds(mode, len(q), len(k), q.device))
            indices[queries], values[queries] = best[:, None], scores[:, None].to(values.dtype)
        ctx.save_for_backward(query, key, weights, indices)
        ctx.mark_non_differentiable(indices)
        ctx.sequence_indices = sequence_indices
        return indices, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate value = sum over heads of weight * relu(q . k), as npu_lightning_indexer_grad does."""
        query, key, weights, indices = ctx.saved_tensors
        dq, dk, dweights = (torch.zeros_like(_wide(x)) for x in (query, key, weights))
        for queries, keys in ctx.sequence_indices:
            q, k, factors = (_wide(x) for x in (query[queries], key[keys][:, 0], weights[queries]))
            chosen, dvalues = indices[queries][:, 0], _wide(grads[1][queries][:, 0])
            for rows in chunks(len(q), chosen.shape[1] * (q.shape[1] + q.shape[2])):
                picked, valid = gathered(k, chosen[rows])
                dots = torch.einsum("thd,tkd->thk", q[rows], picked)
                dvalue = torch.where(valid, dvalues[rows], 0)[:, None]
                dweights[queries][rows] = (dots.relu() * dvalue).sum(-1)
                ddots = dvalue * factors[rows].unsqueeze(-1) * (dots > 0)
                dq[queries][rows] = torch.einsum("thk,tkd->thd", ddots, picked)
                shares = torch.einsum("thk,thd->tkd", ddots, q[rows]).flatten(0, 1)
                dk[keys][:, 0].index_add_(0, chosen[rows].clamp_min(0).flatten().long(), shares)
        inputs = (query, key, weights)
        return *(g.to(x.dtype) for g, x in zip((dq, dk, dweights), inputs, strict=True)), None, None, None


class Attention(torch.autograd.Function):
    """npu_sparse_flash_attention: attend the queries of every sequence to their listed keys.

    Returns the output and, with `with_statistics`, the softmax's max and sum (otherwise empty tensors), which the
    backward needs. mode: sparse_mode.
    """

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
        sequence_indices: SequenceIndices,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = join_rope(query, query_rope), join_rope(key, key_rope)
        out = torch.zeros_like(query)
        tops, sums = (query.new_zeros(query.shape[:-1], dtype=torch.float32) for _ in range(2))
        for queries, keys in sequence_indices:
            listed = sort_indices(indices[queries], mode, len(k[keys]))
            out[queries], lse = sparse_attention(q[queries], k[keys], listed, scale, value_dim=query.shape[-1])
            if with_statistics:
                tops[queries] = _highest_logits(q[queries], k[keys], listed, scale)
                sums[queries] = torch.exp(lse - tops[queries])
        top, total = (to_statistics_order(x) if with_statistics else x.new_empty(0) for x in (tops, sums))
        ctx.save_for_backward(query, key, value, query_rope, key_rope, indices, out, top, total)
        ctx.mark_non_differentiable(top, total)
        ctx.options = (scale, mode, sequence_indices)
        return out, top, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_rope, key_rope, indices, *results = ctx.saved_tensors
        inputs = (query, key, value, query_rope, key_rope)
        dq, dk, dv, dq_rope, dk_rope = attention_gradients(inputs, indices, grads[0], tuple(results), *ctx.options)
        if value is None:  # key is the value too
            dk = dk + dv
        gradients = zip((dq, dk, dv, dq_rope, dk_rope), inputs, strict=True)
        return *(None if x is None else g.to(x.dtype) for g, x in gradients), None, None, None, None, None


def attention_gradients(
    inputs: Inputs,
    indices: Tensor,
    grad: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    scale: float,
    mode: int | None,
    sequence_indices: SequenceIndices,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and both rotary parts, in the accumulation dtype.

    `results` are the forward's output and its softmax's max and sum.
    """
    query, key, _, query_rope, key_rope = inputs
    out, tops, sums = results[0], to_query_order(results[1]), to_query_order(results[2])
    q, k, dim = join_rope(query, query_rope), join_rope(key, key_rope), query.shape[-1]
    dq, dk, dv = (torch.zeros_like(_wide(x)) for x in (q, k, key))
    for queries, keys in sequence_indices:
        listed = sort_indices(indices[queries], mode, len(k[keys]))
        tensors = (_wide(q[queries]), _wide(k[keys][:, 0]), _wide(grad[queries]), _wide(out[queries]))
        dq[queries] = _add_gradients(
            *tensors, tops[queries], sums[queries], listed, scale, dk[keys][:, 0], dv[keys][:, 0]
        )
    return dq[..., :dim], dk[..., :dim], dv, dq[..., dim:], dk[..., dim:]


def _highest_logits(q: Tensor, k: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Return the highest logit of each query and head; 0 where a query has no key."""
    highest = q.new_zeros(q.shape[:2], dtype=torch.float32)
    for rows in chunks(len(q), indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys, valid = gathered(k[:, 0].float(), indices[rows])
        logits = torch.einsum("thd,tkd->thk", q[rows].float(), keys) * scale
        top = torch.where(valid[:, None], logits, -torch.inf).amax(-1)
        highest[rows] = torch.where(valid.any(-1)[:, None], top, 0)
    return highest


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
    """Return dq of one sequence and add its gradients of keys to dk and of values to dv, some queries at a time."""
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
        for total, factors, heads in ((dk, dlogits, q[rows]), (dv, weights, grad[rows])):
            total.index_add_(0, at, torch.einsum("thk,thd->tkd", factors, heads).flatten(0, 1))
    return dq
