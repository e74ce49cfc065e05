"""The lightning indexer and its loss, computed one sequence at a time by `whorl.ops`."""

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops.indexer import index_scores, indexer_kl, indexer_target
from whorl.ops.indexer.bounds import chunks, full_bounds, visible_keys

from .calling import operator
from .sequences import (
    FAR,
    LAYOUTS,
    MODES,
    SequenceIndex,
    check_layout,
    join_rope,
    key_bounds,
    sort_indices,
    split_sequences,
    to_query_order,
)
from .sparse_autograd import Indexer


@operator(
    contracts.lightning_indexer_limit, npu_only="block_table pre_tokens next_tokens", choices={"sparse_mode": MODES}
)
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
    """Return the sparse_count keys with the highest index scores of each query, and the scores.

    query: [B, S, N, D] or, in TND, [T, N, D]; key: the same with one head; weights: [..., N]; sparse_mode 3: causal,
    aligned at the last query, 0: every key. Lengths are per sequence, in TND cumulative. Returns the indices, int32
    [B, S, 1, sparse_count] or [T, 1, sparse_count], and with return_value their scores in query's dtype, which are
    differentiable, else an empty tensor. Off the NPU a query's indices are in ascending order with -1 after the last,
    and of equal scores the lowest index is taken; block_table, other layouts and windows raise ValueError.

    Example: indices, _ = npu_lightning_indexer(q, k, weights, sparse_count=2048)
    """
    check_layout(layout_query, layout_key)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key)
    sequence_indices = list(split_sequences(layout_query, query, key, *lengths))
    indices, values = Indexer.apply(query, key, weights, sequence_indices, sparse_count, sparse_mode)
    return indices, values if return_value else query.new_empty(0)


@operator(
    contracts.indexer_kl_loss_limit,
    no_gradient="query_index key_index weights",
    npu_only="sinks",
    choices={"layout": LAYOUTS, "sparse_mode": MODES},
    index="query_index",
    dtype="query_dtype",
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
    pre_tokens: int | None = FAR,
    next_tokens: int | None = FAR,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query_index, key_index and weights, and the loss of whorl.ops.indexer_kl_loss, fp32 [1].

    The loss is the sum over queries, as in the vendor's formula, not their mean; key has one head. query, key and both
    rotary parts are the inputs of the attention, softmax_max and softmax_sum the statistics of its softmax. Raises
    RuntimeError when a gradient of this call is needed. Off the NPU sinks, other layouts and other modes raise
    ValueError.
    """
    q, k = join_rope(query, query_rope), join_rope(key, key_rope)
    lse = to_query_order(softmax_max) + to_query_order(softmax_sum).log()
    gradients = _Gradients(query_index, key_index, weights)
    for queries, keys in split_sequences(layout, query, key, actual_seq_qlen, actual_seq_klen):
        indices = sort_indices(sparse_indices[queries], sparse_mode, len(k[keys]))
        target = indexer_target(q[queries], k[keys], indices, lse[queries], scale_value)
        index_q, index_k = query_index[queries], key_index[keys][:, 0]
        gradients.add(queries, keys, indexer_kl(index_q, index_k, weights[queries], indices, target))
    return gradients.results()


@operator(no_gradient="query_index key_index weights", choices={"layout": LAYOUTS, "sparse_mode": MODES})
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
    """Return the max and the sum of the softmax over each query's index scores, fp32 [B, 1, S], in TND [1, T].

    Both are 0 for a query that sees no key. Raises RuntimeError when a gradient is needed. Off the NPU other layouts
    and modes raise ValueError.
    """
    tops, sums = (query_index.new_zeros(query_index.shape[:-2], dtype=torch.float32) for _ in range(2))
    for queries, keys in split_sequences(layout, query_index, key_index, actual_seq_qlen, actual_seq_klen):
        q, k, factors = query_index[queries], key_index[keys][:, 0], weights[queries]
        starts, ends = full_bounds(len(q), len(k), *key_bounds(sparse_mode, len(q), len(k), q.device), q.device)
        for rows in chunks(len(q), len(k)):  # some queries at a time, to limit memory
            scores = index_scores(q[rows], k, factors[rows], starts[rows], ends[rows])
            visible = visible_keys(len(scores), len(k), starts[rows], ends[rows], None, q.device)
            # With top 0 for a query that sees no key, its sum below is 0 as well.
            top = torch.where(visible, scores, -torch.inf).amax(-1)
            top = torch.where(visible.any(-1), top, 0)
            tops[queries][rows] = top
            sums[queries][rows] = torch.where(visible, torch.exp(scores - top[:, None]), 0).sum(-1)
    return tops.unsqueeze(-2), sums.unsqueeze(-2)


@operator(
    contracts.indexer_kl_loss_limit,
    no_gradient="query_index key_index weights",
    choices={"layout": LAYOUTS, "sparse_mode": MODES},
    index="query_index",
    dtype="query_dtype",
    dense=lambda call: True,
)
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
    """Return what npu_sparse_lightning_indexer_grad_kl_loss returns, over every visible key.

    key has as many heads as query. The softmaxes of the attention and of the indexer are computed from the statistics
    passed in, and the attention is averaged over the heads. If the statistics are those of these tensors, the average
    sums to 1 over the keys, as in the sparse loss. Tiny probabilities are not clipped in the loss. Raises RuntimeError
    when a gradient of this call is needed. Off the NPU other layouts and modes raise ValueError.
    """
    q, k = join_rope(query, query_rope), join_rope(key, key_rope)
    lse = to_query_order(softmax_max) + to_query_order(softmax_sum).log()
    index_lse = (softmax_max_index + softmax_sum_index.log()).squeeze(-2)
    gradients = _Gradients(query_index, key_index, weights)
    for queries, keys in split_sequences(layout, query, key, actual_seq_qlen, actual_seq_klen):
        count, num_keys = len(q[queries]), len(k[keys])
        starts, ends = full_bounds(count, num_keys, *key_bounds(sparse_mode, count, num_keys, q.device), q.device)
        index_k = key_index[keys][:, 0]
        for rows in chunks(count, num_keys * query_index.shape[-2]):
            bounds = (starts[rows], ends[rows])
            visible = visible_keys(rows.stop - rows.start, num_keys, *bounds, None, q.device)
            target = indexer_target(q[queries][rows], k[keys], None, lse[queries][rows], scale_value, *bounds)
            part = (*queries[:-1], slice(queries[-1].start + rows.start, queries[-1].start + rows.stop))
            target = target / query.shape[-2]
            index_q = query_index[part]
            gradients.add(part, keys, _kl_loss(index_q, index_k, weights[part], target, index_lse[part], visible))
    return gradients.results()


def _kl_loss(
    q: Tensor, k: Tensor, weights: Tensor, target: Tensor, lse: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss KL(target || exp(scores - lse)) [T] and the gradients of q, k and weights, in fp32.

    scores are the index scores of q [T, H, D], k [S, D] and weights [T, H]; target and visible are [T, S], lse is [T].
    The gradients of a query that sees no key are 0.
    """
    q, k, weights = q.float(), k.float(), weights.float()
    dots = torch.einsum("thd,sd->ths", q, k)
    scores = torch.einsum("ths,th->ts", dots.relu(), weights)
    log_q = torch.where(visible, scores - lse.unsqueeze(-1), 0)
    loss = (torch.xlogy(target, target) - target * log_q).sum(-1)
    dscores = torch.where(visible, log_q.exp() - target, 0)
    ddots = dscores.unsqueeze(1) * weights.unsqueeze(-1) * (dots > 0)
    dq, dk = torch.einsum("ths,sd->thd", ddots, k), torch.einsum("ths,thd->sd", ddots, q)
    return loss, dq, dk, (dots.relu() * dscores.unsqueeze(1)).sum(-1)


class _Gradients:
    """Accumulate the loss and its gradients over sequences and slices of queries, in fp32."""

    def __init__(self, q: Tensor, k: Tensor, weights: Tensor) -> None:
        self.dtypes = (q.dtype, k.dtype, weights.dtype)
        self.dq, self.dk, self.dweights = (
            torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, weights)
        )
        self.loss = torch.zeros(1, device=q.device)

    def add(
        self, queries: SequenceIndex, keys: SequenceIndex, loss_and_gradients: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        """Store the gradients of some queries, each of which is added once, and accumulate those of their keys."""
        loss, dq, dk, dweights = loss_and_gradients
        self.loss += loss.sum()
        self.dq[queries], self.dweights[queries] = dq.float(), dweights.float()
        self.dk[keys] += dk[:, None]

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and weights, rounded to their dtypes, and the loss in fp32."""
        dq, dk, dweights = (g.to(d) for g, d in zip((self.dq, self.dk, self.dweights), self.dtypes, strict=True))
        return dq, dk, dweights, self.loss
