"""DeepSeek sparse attention, its indexer and the indexer's loss, sequence by sequence over `whorl.ops`."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops import sparse_attention as attention_operator
from whorl.ops._torch_npu import dtype_name
from whorl.ops.sparse_attention.indexer import chunks, full_bounds, index_scores, lightning_indexer, visible_keys
from whorl.ops.sparse_attention.kl import (
    dense_indexer_kl,
    dense_indexer_target,
    gathered,
    indexer_kl,
    indexer_target,
)

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient

_FAR = 9223372036854775807
Part = tuple[Any, ...]  # what picks one sequence of a tensor: (batch, rows) or (rows,)


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = _FAR,
    next_tokens: int = _FAR,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The keys with the highest index scores of each query: int32 [B, S, 1, sparse_count] or [T, 1, sparse_count].

    Here they ascend and ties go to the lowest; -1 after the last. sparse_mode 3 is causal, counted from the last query,
    0 sees all. Values, in query's dtype, with return_value, else empty. Lengths are per sequence, in TND cumulative. No
    gradient off the NPU.
    """
    name, given = "npu_lightning_indexer", dict(locals())
    limit = contracts.lightning_indexer_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        dtype=dtype_name(query),
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )
    refuse(name, limit)
    if is_npu(query):
        return call_torch_npu(name, **given)
    _refuse_gradient_here(name, query, key, weights)
    refuse_arguments(name, block_table=block_table)
    _check_layout(name, layout_query, layout_key)
    _check_tokens(name, pre_tokens, next_tokens)
    shape = (*query.shape[:-2], 1, sparse_count)
    indices, values = query.new_full(shape, -1, dtype=torch.int32), query.new_zeros(shape)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key)
    for mine, keys in _sequences(name, layout_query, query, key, *lengths):
        q, k = query[mine], key[keys][:, 0]
        found = lightning_indexer(q, k, weights[mine], sparse_count, *_bounds(sparse_mode, len(q), len(k), q.device))
        indices[mine], values[mine] = found[0][:, None], found[1][:, None].to(values.dtype)
    return indices, values if return_value else query.new_empty(0)


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _FAR,
    next_tokens: int = _FAR,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query to the keys in sparse_indices, with key also as value; and the softmax's max and sum.

    query [B, S, N, 512] and its rotary part, key [B, S, 1, 512] and its; or TND. Max and sum are fp32 [B, 1, S, N], in
    TND [1, T, N], or empty without return_softmax_lse. `value` must be key, or None. Gradients off the NPU:
    npu_sparse_flash_attention_grad, or whorl.ops.sparse_attention.
    """
    name, given = "npu_sparse_flash_attention", dict(locals())
    limit = contracts.sparse_flash_attention_limit(
        query_shape=query.shape,
        rope_shape=None if query_rope is None else query_rope.shape,
        dtype=dtype_name(query),
        attention_mode=attention_mode,
        topk=sparse_indices.shape[-1],
    )
    refuse(name, limit)
    if is_npu(query):
        return call_torch_npu(name, **given)
    _refuse_gradient_here(name, query, key, value, query_rope, key_rope)
    refuse_arguments(name, block_table=block_table, sinks=sinks)
    _check_layout(name, layout_query, layout_kv)
    _check_tokens(name, pre_tokens, next_tokens)
    _check_mode(name, sparse_mode)
    _check_absorbed(name, key, value, sparse_block_size)
    q, k = _joined(query, query_rope), _joined(key, key_rope)
    out = torch.zeros_like(query)
    tops, sums = (query.new_zeros(query.shape[:-1], dtype=torch.float32) for _ in range(2))
    lengths = (actual_seq_lengths_query, actual_seq_lengths_kv)
    for mine, keys in _sequences(name, layout_query, query, key, *lengths):
        indices = _ascending(sparse_indices[mine], sparse_mode, len(k[keys]))
        out[mine], lse = attention_operator(q[mine], k[keys], indices, scale_value, value_dim=query.shape[-1])
        if return_softmax_lse:
            tops[mine] = _tops(q[mine], k[keys], indices, scale_value)
            sums[mine] = torch.exp(lse - tops[mine])
    if not return_softmax_lse:
        return out, tops.new_empty(0), sums.new_empty(0)
    return out, _statistics(tops), _statistics(sums)


def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = _FAR,
    next_tokens: int | None = _FAR,
    attention_mode: int | None = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, query_rope and key_rope; empty where there was none.

    Keys and values are one tensor in absorbed attention: its gradient is the sum of those of key and value.
    """
    name, given = "npu_sparse_flash_attention_grad", dict(locals())
    limit = contracts.sparse_flash_attention_limit(
        query_shape=query.shape,
        rope_shape=None if query_rope is None else query_rope.shape,
        dtype=dtype_name(query),
        attention_mode=attention_mode or 0,
        topk=sparse_indices.shape[-1],
        backward=True,
    )
    refuse(name, limit)
    refuse_gradient(name, query, key, d_out)
    if is_npu(query):
        return call_torch_npu(name, **given)
    layout = layout or "BSND"
    _check_layout(name, layout, layout)
    _check_mode(name, sparse_mode)
    _check_absorbed(name, key, value, sparse_block_size)
    q, k, dim = _joined(query, query_rope), _joined(key, key_rope), query.shape[-1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, key))
    tops, sums = _by_query(softmax_max), _by_query(softmax_sum)
    for mine, keys in _sequences(name, layout, query, key, actual_seq_qlen, actual_seq_kvlen):
        indices = _ascending(sparse_indices[mine], sparse_mode, len(k[keys]))
        parts = (q[mine].float(), k[keys][:, 0].float(), d_out[mine].float(), out[mine].float(), tops[mine], sums[mine])
        dq[mine] = _add_gradients(*parts, indices, scale_value, dk[keys][:, 0], dv[keys][:, 0])
    gradients = (dq[..., :dim], dk[..., :dim], dv, dq[..., dim:], dk[..., dim:])
    given_tensors = (query, key, value, query_rope, key_rope)
    return tuple(  # type: ignore[return-value]
        query.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(gradients, given_tensors, strict=True)
    )


def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = _FAR,
    next_tokens: int | None = _FAR,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query_index, key_index and weights, and the loss, fp32 [1], of whorl.ops.indexer_kl_loss.

    The loss is the sum over queries, as the vendor's formula has it, and not their mean. Key heads: one.
    """
    name, given = "npu_sparse_lightning_indexer_grad_kl_loss", dict(locals())
    layout = layout or "BSND"
    refuse(name, _kl_limit(query, key, query_index, layout))
    refuse_gradient(name, query_index, key_index, weights)
    if is_npu(query):
        return call_torch_npu(name, **given)
    refuse_arguments(name, sinks=sinks)
    _check_layout(name, layout, layout)
    _check_mode(name, sparse_mode)
    q, k = _joined(query, query_rope), _joined(key, key_rope)
    lse = _by_query(softmax_max) + _by_query(softmax_sum).log()
    found = _Gradients(query_index, key_index, weights)
    for mine, keys in _sequences(name, layout, query, key, actual_seq_qlen, actual_seq_klen):
        indices = _ascending(sparse_indices[mine], sparse_mode, len(k[keys]))
        target = indexer_target(q[mine], k[keys], indices, lse[mine], scale_value)
        found.add(mine, keys, indexer_kl(query_index[mine], key_index[keys][:, 0], weights[mine], indices, target))
    return found.results()


def npu_dense_lightning_indexer_softmax_lse(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = _FAR,
    next_tokens: int | None = _FAR,
) -> tuple[Tensor, Tensor]:
    """Max and sum of the softmax over each query's index scores, fp32 [B, 1, S], in TND [1, T]; 0 if it sees none."""
    name, given = "npu_dense_lightning_indexer_softmax_lse", dict(locals())
    layout = layout or "BSND"
    refuse_gradient(name, query_index, key_index, weights)
    if is_npu(query_index):
        return call_torch_npu(name, **given)
    _check_layout(name, layout, layout)
    _check_mode(name, sparse_mode)
    tops, sums = (query_index.new_zeros(query_index.shape[:-2], dtype=torch.float32) for _ in range(2))
    for mine, keys in _sequences(name, layout, query_index, key_index, actual_seq_qlen, actual_seq_klen):
        q, k, factors = query_index[mine], key_index[keys][:, 0], weights[mine]
        starts, ends = full_bounds(len(q), len(k), *_bounds(sparse_mode, len(q), len(k), q.device), q.device)
        for rows in chunks(len(q), len(k)):
            scores = index_scores(q[rows], k, factors[rows], starts[rows], ends[rows])
            seen = visible_keys(len(scores), len(k), starts[rows], ends[rows], None, q.device)
            top = torch.where(seen, scores, -torch.inf).amax(-1)
            top = torch.where(seen.any(-1), top, 0)
            tops[mine][rows] = top
            sums[mine][rows] = torch.where(seen, torch.exp(scores - top[:, None]), 0).sum(-1)
    return tops.unsqueeze(-2), sums.unsqueeze(-2)


def npu_dense_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_max_index: Tensor,
    softmax_sum_index: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = _FAR,
    next_tokens: int | None = _FAR,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As npu_sparse_lightning_indexer_grad_kl_loss over every visible key; key has a head for each of query's.

    softmax_max_index and softmax_sum_index save the device a pass; off the NPU they are computed again.
    """
    name, given = "npu_dense_lightning_indexer_grad_kl_loss", dict(locals())
    layout = layout or "BSND"
    refuse(name, _kl_limit(query, key, query_index, layout, dense=True))
    refuse_gradient(name, query_index, key_index, weights)
    if is_npu(query):
        return call_torch_npu(name, **given)
    _check_layout(name, layout, layout)
    _check_mode(name, sparse_mode)
    q, k = _joined(query, query_rope), _joined(key, key_rope)
    lse = _by_query(softmax_max) + _by_query(softmax_sum).log()
    found = _Gradients(query_index, key_index, weights)
    for mine, keys in _sequences(name, layout, query, key, actual_seq_qlen, actual_seq_klen):
        count, num_keys = len(q[mine]), len(k[keys])
        starts, ends = full_bounds(count, num_keys, *_bounds(sparse_mode, count, num_keys, q.device), q.device)
        for rows in chunks(count, num_keys):
            limits = (starts[rows], ends[rows])
            target = dense_indexer_target(q[mine][rows], k[keys], lse[mine][rows], scale_value, *limits)
            part = (*mine[:-1], slice(mine[-1].start + rows.start, mine[-1].start + rows.stop))
            index_k = key_index[keys][:, 0]
            found.add(part, keys, dense_indexer_kl(query_index[part], index_k, weights[part], target, *limits))
    return found.results()


class _Gradients:
    """Sums over sequences and chunks, in fp32."""

    def __init__(self, q: Tensor, k: Tensor, weights: Tensor) -> None:
        self.dtypes = (q.dtype, k.dtype, weights.dtype)
        self.dq, self.dk, self.dweights = (
            torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, weights)
        )
        self.loss = torch.zeros(1, device=q.device)

    def add(self, mine: Part, keys: Part, found: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        loss, dq, dk, dweights = found
        self.loss += loss.sum()
        self.dq[mine], self.dweights[mine] = dq.float(), dweights.float()
        self.dk[keys] += dk[:, None]

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dweights = (g.to(d) for g, d in zip((self.dq, self.dk, self.dweights), self.dtypes, strict=True))
        return dq, dk, dweights, self.loss


def _refuse_gradient_here(name: str, *tensors: Tensor | None) -> None:
    """torch_npu has a gradient, which these plain functions have not."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name}: a gradient is needed, which only torch_npu's has; use whorl.ops, or torch.no_grad()"
        )


def _kl_limit(query: Tensor, key: Tensor, query_index: Tensor, layout: str, dense: bool = False) -> str | None:
    return contracts.indexer_kl_loss_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        index_shape=query_index.shape,
        dtype=dtype_name(query),
        layout=layout,
        dense=dense,
    )


def _check_layout(name: str, layout: str, key_layout: str) -> None:
    if layout not in ("BSND", "TND") or key_layout != layout:
        raise ValueError(f"{name}: layouts are {layout!r} and {key_layout!r}, expected 'BSND' or 'TND' for both here")


def _check_tokens(name: str, *tokens: int | None) -> None:
    if any(t not in (None, _FAR) for t in tokens):
        raise ValueError(f"{name}: pre_tokens and next_tokens are {tokens}, expected their default {_FAR}")


def _check_mode(name: str, mode: int | None) -> None:
    """Of these, 3 and 0, neither looks at pre_tokens and next_tokens."""
    if mode not in (None, 0, 3):
        raise ValueError(f"{name}: sparse_mode is {mode}, expected 0 (no mask) or 3 (causal)")


def _check_absorbed(name: str, key: Tensor, value: Tensor | None, block: int) -> None:
    if value is not None and value is not key and not torch.equal(value, key):
        raise ValueError(f"{name}: value differs from key; attention here is absorbed, with keys as values")
    if block != 1 or key.shape[-2] != 1:
        raise ValueError(f"{name}: sparse_block_size is {block}, key heads {key.shape[-2]}, expected 1 and 1 here")


def _sequences(
    name: str,
    layout: str,
    query: Tensor,
    key: Tensor,
    query_lengths: Tensor | Sequence[int] | None,
    key_lengths: Tensor | Sequence[int] | None,
) -> Iterator[tuple[Part, Part]]:
    """What picks each sequence's queries, and its keys."""
    counts = [None if x is None else [int(n) for n in x] for x in (query_lengths, key_lengths)]
    if layout == "BSND":
        for b in range(query.shape[0]):
            sizes = [x.shape[1] if c is None else c[b] for x, c in zip((query, key), counts, strict=True)]
            yield (b, slice(0, sizes[0])), (b, slice(0, sizes[1]))
        return
    if counts[0] is None or counts[1] is None:
        raise ValueError(f"{name}: TND needs the lengths of queries and keys, cumulative")
    edges = [list(itertools.pairwise([0, *c])) for c in counts if c is not None]
    for (first, last), (first_key, last_key) in zip(*edges, strict=True):
        yield (slice(first, last),), (slice(first_key, last_key),)


def _bounds(mode: int | None, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """sparse_mode 3, the default: causal, counted from the last query; 0: everything."""
    if mode in (None, 3):
        return None, None
    ends = torch.full((queries,), keys, dtype=torch.int32, device=device)
    return torch.zeros_like(ends), ends


def _ascending(indices: Tensor, mode: int | None, num_keys: int) -> Tensor:
    """[S, K] of one sequence, sorted, -1 last, without what the mode hides."""
    indices = indices.squeeze(1) if indices.dim() == 3 else indices
    _, ends = full_bounds(
        len(indices), num_keys, *_bounds(mode, len(indices), num_keys, indices.device), indices.device
    )
    kept = (indices >= 0) & (indices < ends[:, None])
    found = torch.where(kept, indices, num_keys).sort(-1).values
    return torch.where(found < num_keys, found, -1).int()


def _joined(x: Tensor, rope: Tensor | None) -> Tensor:
    return x if rope is None else torch.cat((x, rope.expand(*x.shape[:-1], rope.shape[-1])), -1)


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


def _statistics(x: Tensor) -> Tensor:
    """[B, S, N] to [B, 1, S, N], [T, N] to [1, T, N]."""
    return x.unsqueeze(-3)


def _by_query(x: Tensor) -> Tensor:
    """[B, N2, S, G] to [B, S, N2 * G], [N2, T, G] to [T, N2 * G]."""
    return x.transpose(-3, -2).flatten(-2)
