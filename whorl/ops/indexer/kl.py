"""The training loss of the lightning indexer: the KL divergence from the main model's attention to its scores.

    target[t, s] = sum over heads of the main attention from query t to key s         p = target / sum of target
    loss[t]      = KL(p || softmax(scores[t]))                                         both over the same keys

The keys of a query are the selected ones, listed in its row of `indices` (sparse training) or, with indices None, every
key that it sees (warm-up, where attention is dense). `indexer_target` computes the target, `indexer_kl` the loss and
its gradients. `indexer_kl_gradients` does both; the target is not part of its interface, so that a device may compute
all in one kernel. Where ranks add up their targets, `gradients_over_ranks` calls the two. `loss.py` adds autograd.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from .._op import Values, operator
from .._tracing import is_readable
from . import kl_torch_npu
from .bounds import Bound, Positions, check_bounds, chunks, full_bounds, visible_keys, wide_dtype
from .scores import Keys, Weights, index_scores, triton_reason

Bounds = tuple[Tensor | None, Tensor | None, Tensor | None]  # starts, ends and key_positions
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # loss [T] or [1], dq, dk, dweights
ONE_CALL = {"torch_npu": "torch_npu computes target, loss and gradient in one call; indexer_kl_gradients uses it"}

# Statements that the three operators share. G query heads of the attention share one of its HK key heads.
_QUERIES = Annotated[Tensor, "[T, HI, D] float"]
_INDICES = Annotated[Tensor | None, "[T, K] int32, from -1 to S - 1"]
_DQ = Annotated[Tensor, "[T, HI, D] q"]
_DK = Annotated[Tensor, "[S, D] fp32"]
_DWEIGHTS = Annotated[Tensor, "[T, HI] weights"]


def _check_selection(name: str, key: str, *, indices: Tensor | None, **values: Any) -> None:
    """Raise ValueError unless keys are selected by indices or by bounds, not both; indices need one key head.

    key: the name of the attention's keys.
    """
    bounds = {argument: values[argument] for argument in ("starts", "ends", "key_positions")}
    check_bounds(name, **bounds)
    if indices is None:
        return
    if any(bound is not None for bound in bounds.values()):
        raise ValueError(f"{name}: indices and bounds are given, expected bounds only where indices is None")
    if key in values and values[key].shape[1] != 1:
        size, _, dim = values[key].shape
        raise ValueError(
            f"{name}: {key} is {list(values[key].shape)} {values[key].dtype}, expected [{size}, 1, {dim}] with indices"
        )


def _num_keys(values: Values) -> int:
    """Return the number of keys of a query, absent ones included."""
    return int(values["k"].shape[0] if values["indices"] is None else values["indices"].shape[1])


def gathered(k: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of k [S, D] by index, [T, K, D], zero where the index is -1, and the mask of valid indices."""
    valid = indices >= 0
    rows = k[indices.clamp_min(0).long()] if k.shape[0] else k.new_zeros(*indices.shape, *k.shape[1:])
    return rows.masked_fill(~valid.unsqueeze(-1), 0), valid


# ---- the target


def _fake_target(q: Tensor, k: Tensor, indices: Tensor | None, **_: object) -> Tensor:
    num_keys = k.shape[0] if indices is None else indices.shape[1]
    return q.new_empty(q.shape[0], num_keys, dtype=wide_dtype(q))


def _target_flops(values: Values) -> int:
    return 2 * values["q"].numel() * _num_keys(values)


@operator(
    check=partial(_check_selection, "indexer_target", "k"),
    forward_only=True,
    without=ONE_CALL,
    fake=_fake_target,
    flops=_target_flops,
)
def indexer_target(
    q: Annotated[Tensor, "[T, G*HK, D] float"],
    k: Annotated[Tensor, "[S, HK>0, D] q"],
    indices: _INDICES,
    lse: Annotated[Tensor, "[T, G*HK] fp32"],
    scale: float,
    starts: Bound = None,
    ends: Bound = None,
    key_positions: Positions = None,
) -> Tensor:
    """Sum the main attention over heads: target[t, i] = sum over h of exp(scale * q[t, h] . k[s, h'] - lse[t, h]).

    With indices s = indices[t, i], the target is [T, K] fp32, 0 where s is -1, and k has one head shared by all
    (absorbed MLA). Without them s = i, the target is [T, S] fp32, 0 where t does not see s, and head h uses key head
    h' = h // (H / HK); starts, ends and key_positions are those of `index_scores`, and since the target is large, call
    it with one chunk of queries at a time. lse: natural logarithm, as `sparse_attention` returns it. The target is not
    normalised, because ranks that hold different heads may add up their sums first, and heads are not normalised
    separately. Products and sums are in fp32. No gradient: the main model is not trained through the indexer.
    """
    if indices is None:
        visible = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
        return _visible_target(q, k, lse, scale, visible)
    wide = wide_dtype(q)
    target = torch.empty(indices.shape, dtype=wide, device=q.device)
    for rows in chunks(q.shape[0], indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys, valid = gathered(k[:, 0], indices[rows])
        logits = torch.einsum("thd,tkd->thk", q[rows].to(wide), keys.to(wide)) * scale
        logits = logits - lse[rows].to(wide).unsqueeze(-1)
        target[rows] = logits.exp().sum(1).masked_fill(~valid, 0)
    return target


def _visible_target(q: Tensor, k: Tensor, lse: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Return the target over every visible key. visible: [T, S] bool."""
    wide = wide_dtype(q)
    target = torch.zeros(q.shape[0], k.shape[0], dtype=wide, device=q.device)
    for head in range(q.shape[1]):
        keys = k[:, head // (q.shape[1] // k.shape[1])].to(wide)
        target += torch.exp(q[:, head].to(wide) @ keys.T * scale - lse[:, head, None].to(wide))
    return target.masked_fill(~visible, 0)


def _target_reason(q: Tensor, **_: object) -> str | None:
    """Return None, or the reason that the Triton kernels of the target cannot take the main attention's queries."""
    return None if q.shape[2] <= 1024 else f"a head of {q.shape[2]} channels does not fit one program (1024)"


indexer_target.impl("triton", "kl_triton:target", accepts=_target_reason)


# ---- the loss and its gradients


def row_divergence(scores: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence of each query, [T], and its gradient with respect to the scores, [T, K].

    scores, target: [T, K]; valid: [T, K] bool, the keys that exist. Both results are 0 for a query without keys or
    whose target sums to 0.
    """
    mass = target.sum(-1, keepdim=True)
    p = target / torch.where(mass > 0, mass, 1)
    counted = valid & (mass > 0)
    log_q = torch.log_softmax(scores.masked_fill(~counted, -torch.inf), -1)
    log_q = torch.where(counted, log_q, 0)
    loss = (torch.xlogy(p, p) - p * log_q).sum(-1)
    return loss, torch.where(counted, log_q.exp() - p, 0)


def round_operand(ddots: Tensor, dtype: torch.dtype) -> Tensor:
    """Round gradients as operands of a matmul in `dtype`, and return them in their own dtype.

    They are far below 1, so that in fp16 they are multiplied by 1024 before rounding and divided by it after.
    """
    lift = 1024.0 if dtype == torch.float16 else 1.0
    return (ddots * lift).to(dtype).to(ddots.dtype) / lift


def _check_kl(**values: Any) -> None:
    _check_selection("indexer_kl", "", **values)
    shape, target = [len(values["q"]), _num_keys(values)], values["target"]
    if list(target.shape) != shape:
        raise ValueError(f"indexer_kl: target is {list(target.shape)} {target.dtype}, expected {shape}")


def _kl_flops(values: Values) -> int:
    """Count the operations of scores, dq and dk; the scores are computed twice but counted once."""
    return 6 * _num_keys(values) * values["q"].numel()


@operator(check=_check_kl, forward_only=True, without=ONE_CALL, flops=_kl_flops)
def indexer_kl(
    q: _QUERIES,
    k: Keys,
    weights: Weights,
    indices: _INDICES,
    target: Annotated[Tensor, "[T, N] fp32"],
    starts: Bound = None,
    ends: Bound = None,
    key_positions: Positions = None,
    *,
    grad_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Annotated[Tensor, "[T] fp32"], _DQ, _DK, _DWEIGHTS]:
    """Compute KL(target / sum || softmax(scores)) over the keys of each query, and its gradients, in one call.

    q, k, weights and the bounds are those of `index_scores`; indices and target [T, K] or [T, S] those of
    `indexer_target`, with no target negative and any sum. Returns the loss and the gradients of grad_scale *
    loss.sum(): dq, dk, not rounded because sums over more queries may follow, and dweights. Scores, softmax and sums
    are in fp32; the gradient of a product q . k is rounded to q's dtype before the next matmul. A query without keys,
    or whose target is all zero, has loss 0 and gradient 0; absent keys are not read. `deterministic` adds up dk in a
    fixed order, at the cost of a pass over all keys; without indices the order is always fixed. Then, besides the
    results, two matrices [T, S] are in memory: call it with one chunk of queries at a time.
    """
    if indices is None:
        return _visible_kl(q, k, weights, target, (starts, ends, key_positions), grad_scale)
    wide = wide_dtype(q)
    loss = torch.empty(q.shape[0], dtype=wide, device=q.device)
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    dk = torch.zeros(k.shape, dtype=wide, device=q.device)
    for rows in chunks(q.shape[0], indices.shape[1] * max(1, q.shape[1] + q.shape[2])):
        keys, valid = gathered(k.to(wide), indices[rows])
        queries, factors = q[rows].to(wide), weights[rows].to(wide)
        dots = torch.einsum("thd,tkd->thk", queries, keys)
        scores = torch.einsum("thk,th->tk", dots.relu(), factors)
        loss[rows], dscores = row_divergence(scores, target[rows], valid)
        ddots = round_operand(dscores.unsqueeze(1) * factors.unsqueeze(-1) * (dots > 0), q.dtype)
        dq[rows] = (grad_scale * torch.einsum("thk,tkd->thd", ddots, keys)).to(q.dtype)
        dweights[rows] = (grad_scale * torch.einsum("thk,tk->th", dots.relu(), dscores)).to(weights.dtype)
        if k.shape[0]:
            key_gradients = torch.einsum("thk,thd->tkd", ddots, queries)
            dk.index_add_(0, indices[rows].clamp_min(0).flatten().long(), key_gradients.flatten(0, 1))
    return loss, dq, grad_scale * dk, dweights


def _visible_kl(q: Tensor, k: Tensor, weights: Tensor, target: Tensor, bounds: Bounds, grad_scale: float) -> Results:
    """Return `indexer_kl` over every visible key."""
    wide = wide_dtype(q)
    valid = visible_keys(q.shape[0], k.shape[0], *bounds, q.device)
    scores = index_scores.reference(q, k, weights, *bounds)
    loss, dscores = row_divergence(scores, target, valid)
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    dk, keys = torch.zeros(k.shape, dtype=wide, device=q.device), k.to(wide)
    for head in range(q.shape[1]):
        queries, factors = q[:, head].to(wide), weights[:, head, None].to(wide)
        dots = queries @ keys.T
        ddots = round_operand(dscores * factors * (dots > 0), q.dtype)
        dq[:, head] = (grad_scale * ddots @ keys).to(q.dtype)
        dweights[:, head] = (grad_scale * (dots.relu() * dscores).sum(-1)).to(weights.dtype)
        dk += ddots.T @ queries
    return loss, dq, grad_scale * dk, dweights


indexer_kl.impl("triton", "kl_triton:kl", accepts=triton_reason)


# ---- loss and gradients straight from the attention


def is_causal_choice(indices: Tensor, num_keys: int) -> Tensor:
    """Return [1] bool: whether every row of indices [T, K] lists a key, and none after the query's own.

    The last query has the position of the last key.
    """
    query_keys = torch.arange(num_keys - indices.shape[0], num_keys, device=indices.device)[:, None]
    return ((indices <= query_keys).all() & (indices[:, :1] >= 0).all())[None]


def _check_gradients(*, indices: Tensor | None, causal: bool, **values: Any) -> None:
    _check_selection("indexer_kl_gradients", "main_k", indices=indices, **values)
    if not causal or indices is None or not is_readable(indices) or not indices.numel():
        return
    if not bool(is_causal_choice(indices, values["k"].shape[0])):
        raise ValueError(
            "indexer_kl_gradients: causal is True, but a row of indices is empty or has a key after the query's own"
        )


def _flops(values: Values) -> int:
    return _num_keys(values) * (6 * values["q"].numel() + 2 * values["main_q"].numel())


@operator(check=_check_gradients, forward_only=True, totals=(0,), flops=_flops)
def indexer_kl_gradients(
    q: _QUERIES,
    k: Keys,
    weights: Weights,
    indices: _INDICES,
    main_q: Annotated[Tensor, "[T, G*HK, M] bf16 or fp16 or fp32"],
    main_k: Annotated[Tensor, "[S, HK>0, M] main_q"],
    main_lse: Annotated[Tensor, "[T, G*HK] fp32"],
    starts: Bound = None,
    ends: Bound = None,
    key_positions: Positions = None,
    *,
    scale: float,
    grad_scale: float = 1.0,
    causal: bool = False,
    deterministic: bool = False,
) -> tuple[Annotated[Tensor, "[1] fp32"], _DQ, _DK, _DWEIGHTS]:
    """Compute `indexer_kl` of `indexer_target`: the loss, summed over queries, and its gradients, in one call.

    q, k, weights, indices and the bounds are the indexer's; main_q, main_k, main_lse and scale the attention's. Returns
    the loss and the gradients of grad_scale * loss, as `indexer_kl` does. Without indices queries are processed in
    chunks: no [T, S] matrix is ever allocated. causal: the caller promises that every row of indices lists a key and
    none after the query's own, with the last query at the last key; this is checked only on the CPU, since a check
    would have to wait for any other device. Ascend's fused kernel, which ignores later keys and does not document empty
    rows, runs only when causal is True or indices is None. `deterministic` is that of `indexer_kl`; Ascend promises no
    order.
    """
    tensors: tuple[Any, ...] = (q, k, weights, indices, main_q, main_k, main_lse, starts, ends, key_positions)
    halves = (indexer_target.reference, indexer_kl.reference)
    return target_then_kl(*halves, *tensors, scale=scale, grad_scale=grad_scale, deterministic=deterministic)


def target_then_kl(
    compute_target: Callable[..., Tensor],
    compute_kl: Callable[..., Results],
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float,
    grad_scale: float,
    deterministic: bool = False,
) -> Results:
    """Compute `indexer_kl_gradients` from functions with the parameters of `indexer_target` and `indexer_kl`."""
    options = {"grad_scale": grad_scale, "deterministic": deterministic}
    bounds: Values = {"starts": starts, "ends": ends, "key_positions": key_positions}
    if indices is not None:
        target = compute_target(main_q, main_k, indices, main_lse, scale, **bounds)
        loss, dq, dk, dweights = compute_kl(q, k, weights, indices, target, **bounds, **options)
        return loss.sum()[None], dq, dk, dweights
    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    wide = wide_dtype(q)
    total, dk = (torch.zeros(shape, dtype=wide, device=q.device) for shape in ((1,), k.shape))
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    for rows in chunks(q.shape[0], k.shape[0]):
        bounds |= {"starts": starts[rows], "ends": ends[rows]}
        target = compute_target(main_q[rows], main_k, None, main_lse[rows], scale, **bounds)
        loss, dq[rows], chunk_dk, dweights[rows] = compute_kl(
            q[rows], k, weights[rows], None, target, **bounds, **options
        )
        total = total + loss.sum()
        dk = dk + chunk_dk
    return total, dq, dk, dweights


def gradients_over_ranks(
    reduce_target: Callable[[Tensor], Tensor] | None, *tensors: Any, causal: bool = False, **options: Any
) -> Results:
    """Compute `indexer_kl_gradients` where other ranks hold other heads; reduce_target (an all-reduce) adds up targets.

    None: this rank holds all heads.
    """
    results: Results
    if reduce_target is None:
        results = indexer_kl_gradients(*tensors, causal=causal, **options)
        return results

    def target(*tensors: Any, **bounds: Any) -> Tensor:
        return reduce_target(indexer_target(*tensors, **bounds))

    return target_then_kl(target, indexer_kl, *tensors, **options)


@indexer_kl_gradients.impl("triton", accepts=lambda q, main_q, **_: triton_reason(q) or _target_reason(main_q))
def _(causal: bool, **values: Any) -> Results:
    target, kl = (op.impls["triton"].function for op in (indexer_target, indexer_kl))
    return target_then_kl(target, kl, **values)


indexer_kl_gradients.impl("torch_npu", "kl_torch_npu:gradients", accepts=kl_torch_npu.reason)
