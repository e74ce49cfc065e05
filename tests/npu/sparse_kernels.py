"""DeepSeek sparse attention behind torch_npu's schemas, written from the vendor's formulas."""

from typing import Any

import torch
from torch import Tensor


def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, sparse_count: int = 2048, sparse_mode: int = 3, **given: Any
) -> tuple[Tensor, Tensor]:
    """Highest score first."""
    assert given.get("layout_query", "BSND") == given.get("layout_key", "BSND") == "BSND"
    assert all(x.is_contiguous() and x.dtype == query.dtype for x in (query, key, weights))
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    dots = torch.einsum("bqnd,bkd->bqnk", query.float(), key[:, :, 0].float()).relu()
    scores = torch.einsum("bqnk,bqn->bqk", dots, weights.float())
    if sparse_mode == 3:
        later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    count = min(sparse_count, keys)
    indices = torch.full((batch, queries, 1, sparse_count), -1, dtype=torch.int32)
    chosen = best.indices[..., :count].masked_fill(best.values[..., :count] == -torch.inf, -1)
    indices[:, :, 0, :count] = chosen.int()
    return indices, query.new_empty(0)


def _probabilities(
    query: Tensor, key: Tensor, indices: Tensor, scale: float, query_rope: Tensor, key_rope: Tensor, mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, S, N, K] of the listed keys, -inf where none is, the keys with their rotary part, and their places.

    What the device gives where a row lists nothing is not documented; here it is NaN.
    """
    listed = indices >= 0
    assert bool((listed[..., 1:] <= listed[..., :-1]).all()), "a key after a -1"
    queries, keys = query.shape[1], key.shape[1]
    if mode == 3:
        listed = listed & (indices <= torch.arange(keys - queries, keys)[:, None, None])
    q, k = torch.cat((query, query_rope), -1).float(), torch.cat((key, key_rope), -1)[:, :, 0].float()
    at = indices[:, :, 0].clamp_min(0).long()
    rows = torch.stack([k[b][at[b]] for b in range(len(k))])  # [B, S, K, D]
    logits = torch.einsum("bsnd,bskd->bsnk", q, rows) * scale
    return logits.masked_fill(~listed, -torch.inf), rows, at


def _check_attention(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> None:
    assert given["attention_mode"] == 2
    assert given.get("sparse_block_size", 1) == 1
    assert value.data_ptr() == key.data_ptr()
    assert all(x.is_contiguous() for x in (query, key, given["query_rope"], given["key_rope"]))


def sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, **given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check_attention(query, key, value, given)
    ropes = (given["query_rope"], given["key_rope"])
    logits, rows, _ = _probabilities(query, key, sparse_indices, scale_value, *ropes, given.get("sparse_mode", 3))
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bsnk,bskd->bsnd", weights / total, rows[..., : query.shape[-1]]).to(query.dtype)
    return out, top.transpose(1, 3).transpose(2, 3), total.transpose(1, 3).transpose(2, 3)


def sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor,
    key_rope: Tensor,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = 0,
    next_tokens: int = 0,
    attention_mode: int = 0,
) -> tuple[Tensor, ...]:
    assert layout == "BSND"
    named = {"sparse_block_size": sparse_block_size, "attention_mode": attention_mode}
    _check_attention(query, key, value, {**named, "query_rope": query_rope, "key_rope": key_rope})
    logits, rows, at = _probabilities(query, key, sparse_indices, scale_value, query_rope, key_rope, sparse_mode)
    top, total = (x.transpose(2, 3).transpose(1, 3) for x in (softmax_max, softmax_sum))
    weights, grad, dim = torch.exp(logits - top) / total, d_out.float(), query.shape[-1]
    dp = torch.einsum("bsnd,bskd->bsnk", grad, rows[..., :dim]) - (grad * out.float()).sum(-1, keepdim=True)
    ds = weights * dp * scale_value
    dq = torch.einsum("bsnk,bskd->bsnd", ds, rows)
    q = torch.cat((query, query_rope), -1).float()
    dk, dv = torch.zeros(*key.shape[:2], rows.shape[-1]), torch.zeros(*key.shape[:2], dim)
    for total_of, each, heads in ((dk, ds, q), (dv, weights, grad)):
        shares = torch.einsum("bsnk,bsnd->bskd", each, heads)
        for b in range(len(key)):
            total_of[b].index_add_(0, at[b].flatten(), shares[b].flatten(0, 1))
    found = (dq[..., :dim], dk[:, :, None, :dim], dv[:, :, None], dq[..., dim:], dk[:, :, None, dim:])
    return tuple(x.to(query.dtype).contiguous() for x in found)


def _index_scores(query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """S = q k^T [B, S, N, K] and I = W ReLU(S) [B, S, K] over all keys."""
    dots = torch.einsum("bsnd,bkd->bsnk", query.float(), key[:, :, 0].float())
    return dots, torch.einsum("bsnk,bsn->bsk", dots.relu(), weights.float())


def _visible(query: Tensor, key: Tensor) -> Tensor:
    return torch.arange(key.shape[1]) <= torch.arange(key.shape[1] - query.shape[1], key.shape[1])[:, None]


def _index_gradients(
    query: Tensor, key: Tensor, weights: Tensor, attention: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of sum over t of KL(p || softmax(I)): p is `attention` [B, S, N, K], summed over heads and normalised."""
    assert bool(seen.any(-1).all()), "a query that sees nothing"
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


def _check_loss(tensors: tuple[Tensor, ...], weights: Tensor, given: dict[str, Any]) -> None:
    assert all(x.is_contiguous() and x.dtype == tensors[0].dtype for x in (*tensors, weights))
    assert given.get("layout", "BSND") == "BSND"
    assert given.get("sparse_mode", 3) == 3  # the one the device has


def sparse_indexer_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_loss((query, key, query_index, key_index), weights, given)
    q, k = torch.cat((query, given["query_rope"]), -1).float(), torch.cat((key, given["key_rope"]), -1).float()
    at = torch.where(sparse_indices < 0, key.shape[1], sparse_indices).long()[:, :, 0]
    chosen = torch.zeros(*at.shape[:2], key.shape[1] + 1, dtype=torch.bool).scatter_(-1, at, True)[..., :-1]
    top, total = (x.transpose(2, 3).transpose(1, 3) for x in (softmax_max, softmax_sum))
    logits = torch.einsum("bsnd,bkd->bsnk", q, k[:, :, 0]) * scale_value
    attention = torch.exp(logits - top) / total
    return _index_gradients(query_index, key_index, weights, attention, chosen & _visible(query, key))


def dense_softmax(query_index: Tensor, key_index: Tensor, weights: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    _check_loss((query_index, key_index), weights, given)
    _, scores = _index_scores(query_index, key_index, weights)
    scores = scores.masked_fill(~_visible(query_index, key_index), -torch.inf)
    top = scores.amax(-1)
    return top.unsqueeze(1), torch.exp(scores - top.unsqueeze(-1)).sum(-1).unsqueeze(1)


def dense_indexer_loss(
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
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_loss((query, key, query_index, key_index), weights, given)
    expected = dense_softmax(query_index, key_index, weights)
    for got, right in zip((softmax_max_index, softmax_sum_index), expected, strict=True):
        torch.testing.assert_close(got, right)
    q, k = torch.cat((query, given["query_rope"]), -1).float(), torch.cat((key, given["key_rope"]), -1).float()
    logits = torch.einsum("bsnd,bknd->bsnk", q, k) * scale_value
    attention = torch.exp(logits - softmax_max.transpose(1, 2)) / softmax_sum.transpose(1, 2)
    seen = _visible(query, key).expand(query.shape[0], -1, -1)
    return _index_gradients(query_index, key_index, weights, attention, seen)


KERNELS = {
    "npu_sparse_lightning_indexer_grad_kl_loss": sparse_indexer_loss,
    "npu_dense_lightning_indexer_softmax_lse": dense_softmax,
    "npu_dense_lightning_indexer_grad_kl_loss": dense_indexer_loss,
    "npu_lightning_indexer": lightning_indexer,
    "npu_sparse_flash_attention": sparse_flash_attention,
    "npu_sparse_flash_attention_grad": sparse_flash_attention_grad,
}
