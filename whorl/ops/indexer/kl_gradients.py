"""The indexer's loss and gradients directly from the main attention: the two halves of `kl.py` as one operator.

The [T, K] or [T, S] target is not part of the interface, so that a device may compute target, loss and gradients in one
kernel. Where ranks add up their targets between the two halves, `loss.py` calls the halves separately.
"""

from typing import Any

import torch
from torch import Tensor

from .._op import Values, operator
from .._tracing import is_readable
from . import kl_torch_npu
from .bounds import check_bounds, chunks, full_bounds, wide_dtype
from .dense_kl import dense_indexer_kl, dense_indexer_target
from .kl import check_attention, check_kl_indices, check_main_key, indexer_kl, indexer_target, triton_target_reason
from .scores import check_indexer, triton_reason

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # loss [1], dq, dk, dweights


def check_sizes(name: str, q: Tensor, k: Tensor, main_q: Tensor, main_k: Tensor) -> None:
    """Raise ValueError unless the indexer and the main attention have the same numbers of queries and keys."""
    if q.shape[:1] + k.shape[:1] != main_q.shape[:1] + main_k.shape[:1]:
        raise ValueError(
            f"{name}: q and k have {len(q)} queries and {len(k)} keys, main_q and main_k {len(main_q)} and "
            f"{len(main_k)}, expected the same"
        )


def is_causal_choice(indices: Tensor, num_keys: int) -> Tensor:
    """Return [1] bool: whether every row of indices [T, K] lists a key, and none after the query's own.

    The last query has the position of the last key.
    """
    query_keys = torch.arange(num_keys - indices.shape[0], num_keys, device=indices.device)[:, None]
    return ((indices <= query_keys).all() & (indices[:, :1] >= 0).all())[None]


def _check_tensors(name: str, tensors: Values, *, one_head: bool) -> None:
    """Raise ValueError unless the indexer's and the attention's tensors, by name, fit by themselves and together."""
    q, k, main_q, main_k = (tensors[n] for n in ("q", "k", "main_q", "main_k"))
    check_indexer(name, q, k, tensors["weights"])
    check_sizes(name, q, k, main_q, main_k)
    check_attention(name, main_q, tensors["main_lse"])
    check_main_key(name, "main_k", main_k, main_q, one_head=one_head)


def _check(indices: Tensor, causal: bool, **tensors: Any) -> None:
    name, (num_queries, num_keys) = "indexer_kl_gradients", (tensors["q"].shape[0], tensors["k"].shape[0])
    _check_tensors(name, tensors, one_head=True)
    check_kl_indices(name, indices, num_queries, num_keys)
    if causal and is_readable(indices) and indices.numel() and not bool(is_causal_choice(indices, num_keys)):
        raise ValueError(f"{name}: causal is True, but a row of indices is empty or has a key after the query's own")


def _fake(q: Tensor, k: Tensor, weights: Tensor, **_: object) -> Results:
    wide = wide_dtype(q)
    return (
        q.new_empty(1, dtype=wide),
        q.new_empty(q.shape),
        k.new_empty(k.shape, dtype=wide),
        weights.new_empty(weights.shape),
    )


def _flops(values: Values) -> int:
    pairs, (_, heads, dim) = values["indices"].numel(), values["q"].shape
    return pairs * (6 * heads * dim + 2 * values["main_q"].shape[1] * values["main_q"].shape[2])


@operator(check=_check, forward_only=True, totals=(0,), fake=_fake, flops=_flops)
def indexer_kl_gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    *,
    scale: float,
    grad_scale: float = 1.0,
    causal: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `indexer_kl` of `indexer_target`: the loss, summed over queries, and its gradients, in one call.

    q [T, HI, D], k [S, D], weights [T, HI], indices [T, K] are the indexer's; main_q [T, H, D'], main_k [S, 1, D'],
    main_lse [T, H] and scale are the attention's. Returns loss [1] fp32 and the gradients of grad_scale * loss: dq and
    dweights like q and weights, dk [S, D] fp32. causal: the caller promises that every row of indices lists a key and
    none after the query's own, with the last query at the last key; this is checked only on the CPU, since a check
    would have to wait for any other device. Ascend's fused kernel, which ignores later keys and does not document empty
    rows, runs only when causal is True. `deterministic` is that of `indexer_kl`.
    """
    tensors = (q, k, weights, indices, main_q, main_k, main_lse)
    return _target_then_kl(indexer_target.reference, indexer_kl.reference, tensors, scale, grad_scale, deterministic)


def _target_then_kl(
    compute_target: Any,
    compute_kl: Any,
    tensors: tuple[Tensor, ...],
    scale: float,
    grad_scale: float,
    deterministic: bool,
) -> Results:
    """Compute `indexer_kl_gradients` from one backend's implementations of `indexer_target` and `indexer_kl`."""
    q, k, weights, indices, main_q, main_k, main_lse = tensors
    target = compute_target(main_q, main_k, indices, main_lse, scale)
    loss, *gradients = compute_kl(q, k, weights, indices, target, grad_scale=grad_scale, deterministic=deterministic)
    return loss.sum()[None], *gradients


def _check_dense(starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None, **tensors: Any) -> None:
    name = "dense_indexer_kl_gradients"
    _check_tensors(name, tensors, one_head=False)
    check_bounds(name, tensors["q"].shape[0], tensors["k"].shape[0], starts, ends, key_positions)


def _dense_flops(values: Values) -> int:
    (tokens, heads, dim), main = values["q"].shape, values["main_q"]
    return tokens * values["k"].shape[0] * (6 * heads * dim + 2 * main.shape[1] * main.shape[2])


@operator(check=_check_dense, forward_only=True, totals=(0,), fake=_fake, flops=_dense_flops)
def dense_indexer_kl_gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `dense_indexer_kl` of `dense_indexer_target`: `indexer_kl_gradients` over every visible key.

    main_k: [S, HK, D'], HK key heads; starts, ends and key_positions are those of `index_scores`, the other arguments
    and the results those of `indexer_kl_gradients`. Queries are processed in chunks: no [T, S] matrix is ever
    allocated. dk is added up in a fixed order, except on Ascend, which promises no order.
    """
    return _run_in_chunks(
        dense_indexer_target.reference,
        dense_indexer_kl.reference,
        (q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions),
        scale,
        grad_scale,
    )


def _run_in_chunks(
    compute_target: Any, compute_kl: Any, tensors: tuple[Any, ...], scale: float, grad_scale: float
) -> Results:
    """Compute `dense_indexer_kl_gradients` from one backend's implementations of its two halves, chunk by chunk."""
    q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions = tensors
    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    wide = wide_dtype(q)
    total, dk = (torch.zeros(shape, dtype=wide, device=q.device) for shape in ((1,), k.shape))
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    for rows in chunks(q.shape[0], k.shape[0]):
        bounds = (starts[rows], ends[rows], key_positions)
        target = compute_target(main_q[rows], main_k, main_lse[rows], scale, *bounds)
        loss, dq[rows], chunk_dk, dweights[rows] = compute_kl(
            q[rows], k, weights[rows], target, *bounds, grad_scale=grad_scale
        )
        total = total + loss.sum()
        dk = dk + chunk_dk
    return total, dq, dk, dweights


# ---- backends


def _triton_reason(q: Tensor, main_q: Tensor, **_: object) -> str | None:
    return triton_reason(q) or triton_target_reason(main_q)


@indexer_kl_gradients.impl("triton", accepts=_triton_reason)
def _(q, k, weights, indices, main_q, main_k, main_lse, scale, grad_scale, causal, deterministic):  # type: ignore[no-untyped-def]
    halves = (indexer_target.impls["triton"].function, indexer_kl.impls["triton"].function)
    return _target_then_kl(
        *halves, (q, k, weights, indices, main_q, main_k, main_lse), scale, grad_scale, deterministic
    )


@dense_indexer_kl_gradients.impl("triton", accepts=_triton_reason)
def _(q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions, scale, grad_scale):  # type: ignore[no-untyped-def]
    halves = (dense_indexer_target.impls["triton"].function, dense_indexer_kl.impls["triton"].function)
    tensors = (q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions)
    return _run_in_chunks(*halves, tensors, scale, grad_scale)


indexer_kl_gradients.impl("torch_npu", "kl_torch_npu:gradients", accepts=kl_torch_npu.reason)
dense_indexer_kl_gradients.impl("torch_npu", "kl_torch_npu:dense_gradients", accepts=kl_torch_npu.dense_reason)
