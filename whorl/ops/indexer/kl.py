"""The training loss of the lightning indexer: the KL divergence from the main model's attention to its scores.

    target[t, s] = sum over heads of the main attention from query t to key s         p = target / sum of target
    loss[t]      = KL(p || softmax(scores[t]))                                         both over the same keys

`indexer_kl` is over the selected keys (sparse training), `dense_indexer_kl` over every visible key (warm-up). Each
takes the target of `indexer_target` or `dense_indexer_target` and returns the loss and its gradients in one call.
`kl_gradients.py` combines target and loss in one operator, and `loss.py` adds autograd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._op import Values, operator
from .._tracing import is_readable
from .bounds import chunks, wide_dtype
from .scores import check_indexer, triton_reason

ONE_CALL = "torch_npu computes target, loss and gradient in one call; indexer_kl_gradients uses it"


def check_attention(name: str, q: Tensor, lse: Tensor) -> None:
    """Raise ValueError unless the main attention's q is [T, H, D] and its lse [T, H] fp32."""
    if q.dim() != 3 or not q.is_floating_point():
        raise ValueError(f"{name}: q is {list(q.shape)} {q.dtype}, expected [T, H, D] floating point")
    if lse.shape != q.shape[:2] or lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: lse is {list(lse.shape)} {lse.dtype}, expected {list(q.shape[:2])} torch.float32")


def check_kl_indices(name: str, indices: Tensor, num_queries: int, num_keys: int) -> None:
    """Raise ValueError unless indices are [T, K] int32 and, if `is_readable`, from -1 to num_keys - 1, in any order."""
    if indices.dim() != 2 or indices.shape[0] != num_queries or indices.dtype != torch.int32:
        raise ValueError(
            f"{name}: indices is {list(indices.shape)} {indices.dtype}, expected [{num_queries}, K] torch.int32"
        )
    if is_readable(indices) and indices.numel() and (int(indices.max()) >= num_keys or int(indices.min()) < -1):
        raise ValueError(
            f"{name}: indices go from {int(indices.min())} to {int(indices.max())}, expected -1 to {num_keys - 1}"
        )


def check_main_key(name: str, argument: str, key: Tensor, query: Tensor, *, one_head: bool) -> None:
    """Raise ValueError unless the main attention's keys fit its queries. one_head: they must have one key head."""
    heads, dim = query.shape[1:]
    fits = key.dim() == 3 and key.shape[2] == dim and key.dtype == query.dtype
    if one_head and not (fits and key.shape[1] == 1):
        raise ValueError(f"{name}: {argument} is {list(key.shape)} {key.dtype}, expected [S, 1, {dim}] {query.dtype}")
    if not fits or heads % max(1, key.shape[1]):
        raise ValueError(
            f"{name}: {argument} is {list(key.shape)} {key.dtype}, expected [S, HK, {dim}] {query.dtype} with HK "
            f"dividing {heads}"
        )


def triton_target_reason(q: Tensor, **_: object) -> str | None:
    """Return None, or the reason that the Triton kernels of the target cannot take the main attention's queries."""
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if q.shape[2] <= 1024 else f"a head of {q.shape[2]} channels does not fit one program (1024)"


# ---- the target


def _check_target(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, scale: float) -> None:
    check_attention("indexer_target", q, lse)
    check_main_key("indexer_target", "k", k, q, one_head=True)
    check_kl_indices("indexer_target", indices, q.shape[0], k.shape[0])


def _fake_target(q: Tensor, indices: Tensor, **_: object) -> Tensor:
    return q.new_empty(indices.shape, dtype=wide_dtype(q))


def gathered(k: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of k [S, D] by index, [T, K, D], zero where the index is -1, and the mask of valid indices."""
    valid = indices >= 0
    rows = k[indices.clamp_min(0).long()] if k.shape[0] else k.new_zeros(*indices.shape, *k.shape[1:])
    return rows.masked_fill(~valid.unsqueeze(-1), 0), valid


def _target_flops(values: Values) -> int:
    return 2 * values["indices"].numel() * values["q"].shape[1] * values["q"].shape[2]


@operator(
    check=_check_target, forward_only=True, without={"torch_npu": ONE_CALL}, fake=_fake_target, flops=_target_flops
)
def indexer_target(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Sum the main attention over heads: target[t, i] = sum over h of exp(scale * q[t, h] . k[s] - lse[t, h]).

    s = indices[t, i], and the target is 0 where s is -1. q: [T, H, D] and k: [S, 1, D], one key head shared by all
    (absorbed MLA), bf16, fp16 or fp32; indices: [T, K] int32; lse: [T, H] fp32, natural logarithm, as
    `sparse_attention` returns it; target: [T, K] fp32. The target is not normalised, because ranks that hold different
    heads may add up their sums first, and heads are not normalised separately. Products and sums are in fp32. No
    gradient: the main model is not trained through the indexer.
    """
    wide = wide_dtype(q)
    target = torch.empty(indices.shape, dtype=wide, device=q.device)
    for rows in chunks(q.shape[0], indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys, valid = gathered(k[:, 0], indices[rows])
        logits = torch.einsum("thd,tkd->thk", q[rows].to(wide), keys.to(wide)) * scale
        logits = logits - lse[rows].to(wide).unsqueeze(-1)
        target[rows] = logits.exp().sum(1).masked_fill(~valid, 0)
    return target


indexer_target.impl("triton", "kl_triton:target", accepts=triton_target_reason)


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


def check_target(name: str, target: Tensor, shape: Sequence[int], q: Tensor) -> None:
    """Raise ValueError unless target has this shape and is fp32 (fp64 where q is)."""
    if target.shape != tuple(shape) or target.dtype != wide_dtype(q):
        raise ValueError(
            f"{name}: target is {list(target.shape)} {target.dtype}, expected {list(shape)} {wide_dtype(q)}"
        )


def _check_kl(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, target: Tensor, **_: object) -> None:
    check_indexer("indexer_kl", q, k, weights)
    check_kl_indices("indexer_kl", indices, q.shape[0], k.shape[0])
    check_target("indexer_kl", target, indices.shape, q)


def fake_kl(q: Tensor, k: Tensor, weights: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty outputs of `indexer_kl` or `dense_indexer_kl`, for tracing."""
    wide = wide_dtype(q)
    loss, dk = q.new_empty(q.shape[:1], dtype=wide), k.new_empty(k.shape, dtype=wide)
    return loss, q.new_empty(q.shape), dk, weights.new_empty(weights.shape)


def kl_flops(values: Values) -> int:
    """Count the operations of scores, dq and dk; the scores are computed twice but counted once."""
    return 6 * values["target"].numel() * values["q"].shape[1] * values["q"].shape[2]


@operator(check=_check_kl, forward_only=True, without={"torch_npu": ONE_CALL}, fake=fake_kl, flops=kl_flops)
def indexer_kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    *,
    grad_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute KL(target / sum || softmax(scores)) over the selected keys of each query, and its gradients, in one call.

    q: [T, HI, D], k: [S, D], weights: [T, HI] as in `index_scores`; indices: [T, K] int32, -1 for none; target:
    [T, K] fp32, none negative, with any sum. Returns loss [T] fp32 and the gradients of grad_scale * loss.sum(): dq and
    dweights like q and weights, dk [S, D] fp32, not rounded because sums over more queries may follow. Scores, softmax
    and sums are in fp32; the gradient of a product q . k is rounded to q's dtype before the next matmul. A query
    without keys, or whose target is all zero, has loss 0 and gradient 0; absent keys are not read. `deterministic`
    adds up dk in a fixed order, at the cost of a pass over all keys.
    """
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


indexer_kl.impl("triton", "kl_triton:kl", accepts=triton_reason)
