"""DeepSeek sparse attention behind torch_npu's schemas, written from the vendor's formulas."""

import torch
from npu import paged_kernels
from npu.bound import Call, by_schema
from torch import Tensor


@by_schema("npu_lightning_indexer")
def lightning_indexer(call: Call) -> tuple[Tensor, Tensor]:
    """Highest score first."""
    if call.layout_key == "PA_BSND":
        return paged_kernels.indexer(call)
    query, key, weights, sparse_count = call.query, call.key, call.weights, call.sparse_count
    assert call.layout_query == call.layout_key == "BSND"
    assert all(x.is_contiguous() and x.dtype == query.dtype for x in (query, key, weights))
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    dots = torch.einsum("bqnd,bkd->bqnk", query.float(), key[:, :, 0].float()).relu()
    scores = torch.einsum("bqnk,bqn->bqk", dots, weights.float())
    if call.sparse_mode == 3:
        later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    count = min(sparse_count, keys)
    indices = torch.full((batch, queries, 1, sparse_count), -1, dtype=torch.int32)
    chosen = best.indices[..., :count].masked_fill(best.values[..., :count] == -torch.inf, -1)
    indices[:, :, 0, :count] = chosen.int()
    return indices, query.new_empty(0)


def _probabilities(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, S, N, K] of the listed keys, -inf where none is, the keys with their rotary part, and their places.

    What the device gives where a row lists nothing is not documented; here it is NaN.
    """
    query, key, indices = call.query, call.key, call.sparse_indices
    listed = indices >= 0
    assert bool((listed[..., 1:] <= listed[..., :-1]).all()), "a key after a -1"
    queries, keys = query.shape[1], key.shape[1]
    if call.sparse_mode == 3:
        listed = listed & (indices <= torch.arange(keys - queries, keys)[:, None, None])
    q, k = torch.cat((query, call.query_rope), -1).float(), torch.cat((key, call.key_rope), -1)[:, :, 0].float()
    at = indices[:, :, 0].clamp_min(0).long()
    rows = torch.stack([k[b][at[b]] for b in range(len(k))])  # [B, S, K, D]
    logits = torch.einsum("bsnd,bskd->bsnk", q, rows) * call.scale_value
    return logits.masked_fill(~listed, -torch.inf), rows, at


def _check_attention(call: Call) -> None:
    assert call.attention_mode == 2
    assert call.value.data_ptr() == call.key.data_ptr()
    assert all(x.is_contiguous() for x in (call.query, call.key, call.query_rope, call.key_rope))


@by_schema("npu_sparse_flash_attention")
def sparse_flash_attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    _check_attention(call)
    if call.layout_kv == "PA_BSND":
        return paged_kernels.attention(call)
    assert call.sparse_block_size == 1
    logits, rows, _ = _probabilities(call)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bsnk,bskd->bsnd", weights / total, rows[..., : call.query.shape[-1]])
    has_statistics = call.return_softmax_lse
    statistics = (x.transpose(1, 3).transpose(2, 3) if has_statistics else x.new_empty(0) for x in (top, total))
    return out.to(call.query.dtype), *statistics


@by_schema("npu_sparse_flash_attention_grad")
def sparse_flash_attention_grad(call: Call) -> tuple[Tensor, ...]:
    _check_attention(call)
    assert call.sparse_block_size == 1
    query, key, d_out = call.query, call.key, call.d_out
    logits, rows, at = _probabilities(call)
    top, total = (x.transpose(2, 3).transpose(1, 3) for x in (call.softmax_max, call.softmax_sum))
    weights, grad, dim = torch.exp(logits - top) / total, d_out.float(), query.shape[-1]
    dp = torch.einsum("bsnd,bskd->bsnk", grad, rows[..., :dim]) - (grad * call.out.float()).sum(-1, keepdim=True)
    ds = weights * dp * call.scale_value
    dq = torch.einsum("bsnk,bskd->bsnd", ds, rows)
    q = torch.cat((query, call.query_rope), -1).float()
    dk, dv = torch.zeros(*key.shape[:2], rows.shape[-1]), torch.zeros(*key.shape[:2], dim)
    for total_of, each, heads in ((dk, ds, q), (dv, weights, grad)):
        shares = torch.einsum("bsnk,bsnd->bskd", each, heads)
        for b in range(len(key)):
            total_of[b].index_add_(0, at[b].flatten(), shares[b].flatten(0, 1))
    gradients = (dq[..., :dim], dk[:, :, None, :dim], dv[:, :, None], dq[..., dim:], dk[:, :, None, dim:])
    return tuple(x.to(query.dtype).contiguous() for x in gradients)


def _index_scores(query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """S = q k^T [B, S, N, K] and I = W ReLU(S) [B, S, K] over all keys."""
    dots = torch.einsum("bsnd,bkd->bsnk", query.float(), key[:, :, 0].float())
    return dots, torch.einsum("bsnk,bsn->bsk", dots.relu(), weights.float())


def _visible(query: Tensor, key: Tensor) -> Tensor:
    return torch.arange(key.shape[1]) <= torch.arange(key.shape[1] - query.shape[1], key.shape[1])[:, None]


def _index_gradients(call: Call, attention: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of sum over t of KL(p || softmax(I)): p is `attention` [B, S, N, K], summed over heads and normalised."""
    assert bool(seen.any(-1).all()), "a query that sees nothing"
    query, key, weights = call.query_index, call.key_index, call.weights
    p = attention.masked_fill(~seen.unsqueeze(2), 0).sum(2)
    p = p / p.sum(-1, keepdim=True)
    dots, scores = _index_scores(query, key, weights)
    log_q = torch.log_softmax(scores.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0)
    loss = (torch.xlogy(p, p) - p * log_q).sum()
    di = torch.where(seen, log_q.exp() - p, 0)
    ds = di.unsqueeze(2) * weights.float().unsqueeze(-1) * (dots > 0)
    dq = torch.einsum("bsnk,bkd->bsnd", ds, key[:, :, 0].float())
    dk = torch.einsum("bsnk,bsnd->bkd", ds, query.float())
    dweights = torch.einsum("bsnk,bsk->bsn", dots.relu(), di)
    return dq.to(query.dtype), dk.unsqueeze(2).to(key.dtype), dweights.to(weights.dtype), loss.view(1)


def _check_loss(call: Call, *more: Tensor) -> None:
    tensors = (call.query_index, call.key_index, call.weights, *more)
    assert all(x.is_contiguous() and x.dtype == tensors[0].dtype for x in tensors)
    assert call.layout == "BSND"
    assert call.sparse_mode == 3  # the one the device has


@by_schema("npu_sparse_lightning_indexer_grad_kl_loss")
def sparse_indexer_loss(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, indices = call.query, call.key, call.sparse_indices
    _check_loss(call, query, key)
    q, k = torch.cat((query, call.query_rope), -1).float(), torch.cat((key, call.key_rope), -1).float()
    at = torch.where(indices < 0, key.shape[1], indices).long()[:, :, 0]
    chosen = torch.zeros(*at.shape[:2], key.shape[1] + 1, dtype=torch.bool).scatter_(-1, at, True)[..., :-1]
    top, total = (x.transpose(2, 3).transpose(1, 3) for x in (call.softmax_max, call.softmax_sum))
    logits = torch.einsum("bsnd,bkd->bsnk", q, k[:, :, 0]) * call.scale_value
    attention = torch.exp(logits - top) / total
    return _index_gradients(call, attention, chosen & _visible(query, key))


@by_schema("npu_dense_lightning_indexer_softmax_lse")
def dense_softmax(call: Call) -> tuple[Tensor, Tensor]:
    _check_loss(call)
    _, scores = _index_scores(call.query_index, call.key_index, call.weights)
    scores = scores.masked_fill(~_visible(call.query_index, call.key_index), -torch.inf)
    top = scores.amax(-1)
    return top.unsqueeze(1), torch.exp(scores - top.unsqueeze(-1)).sum(-1).unsqueeze(1)


@by_schema("npu_dense_lightning_indexer_grad_kl_loss")
def dense_indexer_loss(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key = call.query, call.key
    _check_loss(call, query, key)
    expected = dense_softmax(call.query_index, call.key_index, call.weights)
    for got, right in zip((call.softmax_max_index, call.softmax_sum_index), expected, strict=True):
        torch.testing.assert_close(got, right)
    q, k = torch.cat((query, call.query_rope), -1).float(), torch.cat((key, call.key_rope), -1).float()
    logits = torch.einsum("bsnd,bknd->bsnk", q, k) * call.scale_value
    attention = torch.exp(logits - call.softmax_max.transpose(1, 2)) / call.softmax_sum.transpose(1, 2)
    return _index_gradients(call, attention, _visible(query, key).expand(query.shape[0], -1, -1))


KERNELS = {
    "npu_sparse_lightning_indexer_grad_kl_loss": sparse_indexer_loss,
    "npu_dense_lightning_indexer_softmax_lse": dense_softmax,
    "npu_dense_lightning_indexer_grad_kl_loss": dense_indexer_loss,
    "npu_lightning_indexer": lightning_indexer,
    "npu_sparse_flash_attention": sparse_flash_attention,
    "npu_sparse_flash_attention_grad": sparse_flash_attention_grad,
}
