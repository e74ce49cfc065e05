"""The lightning indexer and its loss, sequence by sequence over `whorl.ops`."""

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import dtype_name
from whorl.ops.indexer import dense_indexer_target, index_scores, indexer_kl, indexer_target
from whorl.ops.indexer.bounds import chunks, full_bounds, visible_keys

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient
from .sequences import (
    FAR,
    Part,
    ascending,
    bounds,
    by_query,
    check_layout,
    check_mode,
    check_tokens,
    joined,
    sequences,
)
from .sparse_autograd import Indexer


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
    pre_tokens: int = FAR,
    next_tokens: int = FAR,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The keys with the highest index scores of each query: int32 [B, S, 1, sparse_count] or [T, 1, sparse_count].

    Here they ascend and ties go to the lowest; -1 after the last. sparse_mode 3 is causal, counted from the last query,
    0 sees all. Values, in query's dtype, with return_value, else empty; they are differentiable. Lengths are per
    sequence, in TND cumulative.
    """
    name, given = "npu_lightning_indexer", dict(locals())
    if is_npu(query):
        return call_torch_npu(name, **given)
    limit = contracts.lightning_indexer_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        dtype=dtype_name(query),
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )
    refuse(name, limit)
    refuse_arguments(name, block_table=block_table)
    check_layout(name, layout_query, layout_key)
    check_tokens(name, pre_tokens, next_tokens)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key)
    parts = list(sequences(name, layout_query, query, key, *lengths))
    indices, values = Indexer.apply(query, key, weights, parts, sparse_count, sparse_mode)
    return indices, values if return_value else query.new_empty(0)


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
    pre_tokens: int | None = FAR,
    next_tokens: int | None = FAR,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query_index, key_index and weights, and the loss, fp32 [1], of whorl.ops.indexer_kl_loss.

    The loss is the sum over queries, as the vendor's formula has it, and not their mean. Key heads: one.
    """
    name, given = "npu_sparse_lightning_indexer_grad_kl_loss", dict(locals())
    layout = layout or "BSND"
    refuse_gradient(name, query_index, key_index, weights)
    if is_npu(query):
        return call_torch_npu(name, **given)
    refuse(name, _kl_limit(query, key, query_index, layout))
    refuse_arguments(name, sinks=sinks)
    check_layout(name, layout, layout)
    check_mode(name, sparse_mode)
    q, k = joined(query, query_rope), joined(key, key_rope)
    lse = by_query(softmax_max) + by_query(softmax_sum).log()
    found = _Gradients(query_index, key_index, weights)
    for mine, keys in sequences(name, layout, query, key, actual_seq_qlen, actual_seq_klen):
        indices = ascending(sparse_indices[mine], sparse_mode, len(k[keys]))
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
    pre_tokens: int | None = FAR,
    next_tokens: int | None = FAR,
) -> tuple[Tensor, Tensor]:
    """Max and sum of the softmax over each query's index scores, fp32 [B, 1, S], in TND [1, T]; 0 if it sees none."""
    name, given = "npu_dense_lightning_indexer_softmax_lse", dict(locals())
    layout = layout or "BSND"
    refuse_gradient(name, query_index, key_index, weights)
    if is_npu(query_index):
        return call_torch_npu(name, **given)
    check_layout(name, layout, layout)
    check_mode(name, sparse_mode)
    tops, sums = (query_index.new_zeros(query_index.shape[:-2], dtype=torch.float32) for _ in range(2))
    for mine, keys in sequences(name, layout, query_index, key_index, actual_seq_qlen, actual_seq_klen):
        q, k, factors = query_index[mine], key_index[keys][:, 0], weights[mine]
        starts, ends = full_bounds(len(q), len(k), *bounds(sparse_mode, len(q), len(k), q.device), q.device)
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
    pre_tokens: int | None = FAR,
    next_tokens: int | None = FAR,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As npu_sparse_lightning_indexer_grad_kl_loss over every visible key; key has a head for each of query's.

    Both softmaxes are of the statistics that are given, and the attention is averaged over the heads: with statistics
    that belong to these tensors that is the normalised sum. The loss is not clipped where a probability is tiny.
    """
    name, given = "npu_dense_lightning_indexer_grad_kl_loss", dict(locals())
    layout = layout or "BSND"
    refuse_gradient(name, query_index, key_index, weights)
    if is_npu(query):
        return call_torch_npu(name, **given)
    refuse(name, _kl_limit(query, key, query_index, layout, dense=True))
    check_layout(name, layout, layout)
    check_mode(name, sparse_mode)
    q, k = joined(query, query_rope), joined(key, key_rope)
    lse = by_query(softmax_max) + by_query(softmax_sum).log()
    index_lse = (softmax_max_index + softmax_sum_index.log()).squeeze(-2)
    found = _Gradients(query_index, key_index, weights)
    for mine, keys in sequences(name, layout, query, key, actual_seq_qlen, actual_seq_klen):
        count, num_keys = len(q[mine]), len(k[keys])
        starts, ends = full_bounds(count, num_keys, *bounds(sparse_mode, count, num_keys, q.device), q.device)
        index_k = key_index[keys][:, 0]
        for rows in chunks(count, num_keys * query_index.shape[-2]):
            limits = (starts[rows], ends[rows])
            seen = visible_keys(rows.stop - rows.start, num_keys, *limits, None, q.device)
            target = dense_indexer_target(q[mine][rows], k[keys], lse[mine][rows], scale_value, *limits)
            part = (*mine[:-1], slice(mine[-1].start + rows.start, mine[-1].start + rows.stop))
            target = target / query.shape[-2]
            found.add(part, keys, _divergence(query_index[part], index_k, weights[part], target, index_lse[part], seen))
    return found.results()


def _divergence(
    q: Tensor, k: Tensor, weights: Tensor, target: Tensor, lse: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss [T] of target from exp(scores - lse), and its gradients, in fp32. A query that sees nothing has none."""
    q, k, weights = q.float(), k.float(), weights.float()
    dots = torch.einsum("thd,sd->ths", q, k)
    scores = torch.einsum("ths,th->ts", dots.relu(), weights)
    log_q = torch.where(seen, scores - lse.unsqueeze(-1), 0)
    loss = (torch.xlogy(target, target) - target * log_q).sum(-1)
    dscores = torch.where(seen, log_q.exp() - target, 0)
    ddots = dscores.unsqueeze(1) * weights.unsqueeze(-1) * (dots > 0)
    dq, dk = torch.einsum("ths,sd->thd", ddots, k), torch.einsum("ths,thd->sd", ddots, q)
    return loss, dq, dk, (dots.relu() * dscores.unsqueeze(1)).sum(-1)


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


def _kl_limit(query: Tensor, key: Tensor, query_index: Tensor, layout: str, dense: bool = False) -> str | None:
    return contracts.indexer_kl_loss_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        index_shape=query_index.shape,
        dtype=dtype_name(query),
        layout=layout,
        dense=dense,
    )
