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


def reason(q: Tensor, k: Tensor, indices: Tensor | None, main_q: Tensor, main_k: Tensor, **options: Any) -> str | None:
    """Return why fused calls cannot compute this, or None; torch_npu 2.9 does not have that of visible keys."""
    if options["deterministic"]:
        return "does not document the order in which it adds; deterministic is True"
    if indices is None:
        if options.get("ends") is not None:
            return "attends to all keys up to the query's own; bounds and positions are not taken"
        limit = _limit(q, k, main_q, main_k, HEAD, None)
        return limit or _torch_npu.missing("npu_dense_lightning_indexer_grad_kl_loss")
    if not options["causal"]:
        return "ignores keys after the query's own and does not document rows without keys; causal is False"
    if not indices.numel():
        return "empty tensors are not taken"
    return _limit(q, k, main_q, main_k, LATENT, indices.shape[1] + -indices.shape[1] % SELECTED)


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


def gradients(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor | None, main_q: Tensor, main_k: Tensor, **options: Any
) -> Results:
    """Add up the results of consecutive calls, each with the keys up to that of its last query."""
    main_lse, grad_scale = options["main_lse"], options["grad_scale"]
    dq, dweights = torch.empty_like(q), torch.empty_like(weights)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    loss = torch.zeros(1, dtype=torch.float32, device=q.device)
    for rows in chunks(q.shape[0], 1, MOST_QUERIES):
        keys = slice(k.shape[0] - q.shape[0] + rows.stop)
        dim = HEAD if indices is None else LATENT
        arguments = _arguments(q[rows], k[keys], weights[rows], main_q[rows], main_k[keys], dim)
        if indices is None:
            name = "npu_dense_lightning_indexer_grad_kl_loss"
            top = main_lse[rows].T[None, ..., None].contiguous()  # every head has its own key head
            index = {n: arguments[n] for n in ("query_index", "key_index", "weights", "layout", "sparse_mode")}
            index_top, index_sum = _torch_npu.call("npu_dense_lightning_indexer_softmax_lse", **index)
            arguments |= {"softmax_max_index": index_top, "softmax_sum_index": index_sum}
        else:
            name = "npu_sparse_lightning_indexer_grad_kl_loss"
            top = main_lse[None, None, rows].contiguous()
            filled = torch.nn.functional.pad(indices[rows], (0, -indices.shape[1] % SELECTED), value=-1)
            arguments["sparse_indices"] = filled[None, :, None].contiguous()
        part_dq, part_dk, part_dweights, part_loss = _torch_npu.call(
            name,
            **arguments,
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            scale_value=options["scale"],
        )
        dq[rows], dweights[rows] = part_dq[0].float() * grad_scale, part_dweights[0].float() * grad_scale
        dk[: part_dk.shape[1]] += part_dk[0, :, 0].float() * grad_scale
        loss += part_loss
    return loss, dq, dk, dweights
