"""The indexer's loss and gradients on Ascend: torch_npu's fused operators, which know one causal sequence."""

from typing import Any

import torch
from torch import Tensor

from whorl.contracts import indexer_kl_loss_limit
from whorl.device import HOME

from .. import _torch_npu
from .._torch_npu import dtype_name
from .indexer import chunks

MOST_QUERIES = 8192  # of one call
LATENT, HEAD, ROPE = 512, 128, 64  # channels of absorbed attention and of ordinary heads, rotary ones apart
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _limit(q: Tensor, k: Tensor, main_q: Tensor, main_k: Tensor, main_dim: int) -> str | None:
    if q.device.type != HOME["torch_npu"]:
        return f"runs on {HOME['torch_npu']}, got {q.device.type}"
    if not all(x.numel() for x in (q, k, main_q, main_k)):
        return "empty tensors are not taken"
    if q.shape[0] > k.shape[0]:
        return f"the last query is at the last key, got {q.shape[0]} queries of {k.shape[0]} keys"
    if main_q.shape[2] != main_dim + ROPE:
        return f"heads of {main_dim} and a rotary part of {ROPE}, got {main_q.shape[2]} channels"
    return indexer_kl_loss_limit(
        query_shape=(min(MOST_QUERIES, q.shape[0]), main_q.shape[1], main_dim),
        key_shape=(main_k.shape[0], main_k.shape[1], main_dim),
        index_shape=q.shape,
        dtype=dtype_name(q),
        layout="BSND",
        dense=main_dim == HEAD,
    )


def takes(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, main_q: Tensor, main_k: Tensor, main_lse: Tensor
) -> bool:
    """Whether one fused call computes this. It drops keys past the query's own, and says nothing of rows without any:
    looking at the indices waits for the device."""
    if _limit(q, k, main_q, main_k, LATENT) is not None or not indices.numel():
        return False
    own = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    return bool(_torch_npu.on_host(((indices <= own).all() & (indices[:, :1] >= 0).all())[None])[0])


def takes_dense(q: Tensor, k: Tensor, weights: Tensor, main_q: Tensor, main_k: Tensor, main_lse: Tensor) -> bool:
    """The same of causal attention to every key, the last query at the last key; torch_npu 2.9 does not have it."""
    if _limit(q, k, main_q, main_k, HEAD) is not None:
        return False
    return _torch_npu.missing("npu_dense_lightning_indexer_grad_kl_loss") is None


def _arguments(q: Tensor, k: Tensor, weights: Tensor, main_q: Tensor, main_k: Tensor, dim: int) -> dict[str, Any]:
    """One sequence as [1, S, N, D], rotary channels apart; the weights in the indexer's dtype, as it chose with."""
    return {
        "query": main_q[None, ..., :dim].contiguous(),
        "key": main_k[None, ..., :dim].contiguous(),
        "query_index": q[None].contiguous(),
        "key_index": k[None, :, None].contiguous(),
        "weights": weights[None].to(q.dtype).contiguous(),
        "query_rope": main_q[None, ..., dim:].contiguous(),
        "key_rope": main_k[None, ..., dim:].contiguous(),
        "layout": "BSND",
        "sparse_mode": 3,
    }


class _Sums:
    """Results of one call after the other, times grad_scale."""

    def __init__(self, q: Tensor, k: Tensor, weights: Tensor, grad_scale: float) -> None:
        self.dq, self.dweights = torch.empty_like(q), torch.empty_like(weights)
        self.dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        self.loss, self.scale = torch.zeros(1, dtype=torch.float32, device=q.device), grad_scale

    def add(self, rows: slice, found: Results) -> None:
        dq, dk, dweights, loss = found
        self.dq[rows], self.dweights[rows] = dq[0].float() * self.scale, dweights[0].float() * self.scale
        self.dk[: dk.shape[1]] += dk[0, :, 0].float() * self.scale
        self.loss += loss

    def results(self) -> Results:
        return self.loss, self.dq, self.dk, self.dweights


def gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    scale: float,
    grad_scale: float,
) -> Results:
    """loss [1], the sum over queries, and dq, dk, dweights of grad_scale * loss, of what `takes` takes."""
    spare = k.shape[0] - q.shape[0]
    sums = _Sums(q, k, weights, grad_scale)
    for rows in chunks(q.shape[0], 1, MOST_QUERIES):
        keys = slice(spare + rows.stop)
        top = main_lse[None, None, rows].contiguous()
        found = _torch_npu.call(
            "npu_sparse_lightning_indexer_grad_kl_loss",
            **_arguments(q[rows], k[keys], weights[rows], main_q[rows], main_k[keys], LATENT),
            sparse_indices=indices[None, rows, None].contiguous(),
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            scale_value=scale,
        )
        sums.add(rows, found)
    return sums.results()


def dense_gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    scale: float,
    grad_scale: float,
) -> Results:
    spare, sums = k.shape[0] - q.shape[0], _Sums(q, k, weights, grad_scale)
    for rows in chunks(q.shape[0], 1, MOST_QUERIES):
        keys = slice(spare + rows.stop)
        given = _arguments(q[rows], k[keys], weights[rows], main_q[rows], main_k[keys], HEAD)
        index = {n: given[n] for n in ("query_index", "key_index", "weights", "layout", "sparse_mode")}
        index_top, index_sum = _torch_npu.call("npu_dense_lightning_indexer_softmax_lse", **index)
        top = main_lse[rows].T[None, ..., None].contiguous()  # a key head for each head
        found = _torch_npu.call(
            "npu_dense_lightning_indexer_grad_kl_loss",
            **given,
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            softmax_max_index=index_top,
            softmax_sum_index=index_sum,
            scale_value=scale,
        )
        sums.add(rows, found)
    return sums.results()
