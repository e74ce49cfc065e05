"""The indexer's loss and gradients on Ascend: torch_npu's fused operators, which handle one causal sequence."""

from typing import Any

import torch
from torch import Tensor

from whorl.contracts import indexer_kl_loss_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from .bounds import chunks

MOST_QUERIES = 8192  # queries per call
SELECTED = 1024  # the columns of indices must be a multiple of this
LATENT, HEAD, ROPE = 512, 128, 64  # channels of absorbed attention and of ordinary heads, and their rotary channels
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _limit(q: Tensor, k: Tensor, main_q: Tensor, main_k: Tensor, main_dim: int, topk: int | None) -> str | None:
    if not all(x.numel() for x in (q, k, main_q, main_k)):
        return "empty tensors are not taken"
    if q.shape[0] > k.shape[0]:
        return f"takes at most as many queries as keys, got {q.shape[0]} queries and {k.shape[0]} keys"
    if main_q.shape[2] != main_dim + ROPE:
        return f"takes heads of {main_dim} + {ROPE} rotary channels, got {main_q.shape[2]}"
    if main_q.dtype != q.dtype:
        return f"takes one dtype for the indexer and the attention, got {q.dtype} and {main_q.dtype}"
    return indexer_kl_loss_limit(
        query_shape=(min(MOST_QUERIES, q.shape[0]), main_q.shape[1], main_dim),
        key_shape=(main_k.shape[0], main_k.shape[1], main_dim),
        index_shape=q.shape,
        dtype=dtype_name(q),
        layout="BSND",
        dense=main_dim == HEAD,
        topk=topk,
    )


def reason(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    causal: bool,
    deterministic: bool,
    **_: object,
) -> str | None:
    """Return why one fused call cannot compute this, or None."""
    if not causal:
        return "ignores keys after the query's own and does not document rows without keys; causal is False"
    if deterministic:
        return "does not document the order in which it adds; deterministic is True"
    if not indices.numel():
        return "empty tensors are not taken"
    return _limit(q, k, main_q, main_k, LATENT, indices.shape[1] + -indices.shape[1] % SELECTED)


def dense_reason(
    q: Tensor,
    k: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    ends: Tensor | None,
    key_positions: Tensor | None,
    **_: object,
) -> str | None:
    """Return why one fused call cannot compute the dense loss, or None; torch_npu 2.9 does not have the operator."""
    if ends is not None or key_positions is not None:
        return "attends to all keys up to the query's own; bounds and positions are not taken"
    limit = _limit(q, k, main_q, main_k, HEAD, None)
    return limit or _torch_npu.missing("npu_dense_lightning_indexer_grad_kl_loss")


def _arguments(q: Tensor, k: Tensor, weights: Tensor, main_q: Tensor, main_k: Tensor, dim: int) -> dict[str, Any]:
    """Return one sequence as [1, S, N, D], rotary channels split off, weights in q's dtype as in the selection."""
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
    """Accumulated results of consecutive calls, with the gradients multiplied by grad_scale."""

    def __init__(self, q: Tensor, k: Tensor, weights: Tensor, grad_scale: float) -> None:
        self.dq, self.dweights = torch.empty_like(q), torch.empty_like(weights)
        self.dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        self.loss, self.scale = torch.zeros(1, dtype=torch.float32, device=q.device), grad_scale

    def add(self, rows: slice, results: Results) -> None:
        dq, dk, dweights, loss = results
        self.dq[rows], self.dweights[rows] = dq[0].float() * self.scale, dweights[0].float() * self.scale
        self.dk[: dk.shape[1]] += dk[0, :, 0].float() * self.scale
        self.loss += loss

    def results(self) -> Results:
        return self.loss, self.dq, self.dk, self.dweights


def _tensors(values: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(values[name] for name in ("q", "k", "weights", "main_q", "main_k"))


def gradients(indices: Tensor, main_lse: Tensor, scale: float, grad_scale: float, **tensors: Any) -> Results:
    q, k, weights, main_q, main_k = _tensors(tensors)
    num_earlier_keys = k.shape[0] - q.shape[0]
    filled = torch.nn.functional.pad(indices, (0, -indices.shape[1] % SELECTED), value=-1)
    sums = _Sums(q, k, weights, grad_scale)
    for rows in chunks(q.shape[0], 1, MOST_QUERIES):
        keys = slice(num_earlier_keys + rows.stop)
        top = main_lse[None, None, rows].contiguous()
        results = _torch_npu.call(
            "npu_sparse_lightning_indexer_grad_kl_loss",
            **_arguments(q[rows], k[keys], weights[rows], main_q[rows], main_k[keys], LATENT),
            sparse_indices=filled[None, rows, None].contiguous(),
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            scale_value=scale,
        )
        sums.add(rows, results)
    return sums.results()


def dense_gradients(main_lse: Tensor, scale: float, grad_scale: float, **tensors: Any) -> Results:
    q, k, weights, main_q, main_k = _tensors(tensors)
    num_earlier_keys, sums = k.shape[0] - q.shape[0], _Sums(q, k, weights, grad_scale)
    for rows in chunks(q.shape[0], 1, MOST_QUERIES):
        keys = slice(num_earlier_keys + rows.stop)
        arguments = _arguments(q[rows], k[keys], weights[rows], main_q[rows], main_k[keys], HEAD)
        index = {n: arguments[n] for n in ("query_index", "key_index", "weights", "layout", "sparse_mode")}
        index_top, index_sum = _torch_npu.call("npu_dense_lightning_indexer_softmax_lse", **index)
        top = main_lse[rows].T[None, ..., None].contiguous()  # every head has its own key head
        results = _torch_npu.call(
            "npu_dense_lightning_indexer_grad_kl_loss",
            **arguments,
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            softmax_max_index=index_top,
            softmax_sum_index=index_sum,
            scale_value=scale,
        )
        sums.add(rows, results)
    return sums.results()
