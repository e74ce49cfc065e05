"""What the lightning indexer is trained by: the divergence of its choice from the attention of the main model.

    target[t, s] = sum over heads of the main attention, s among the keys of t        p = target / sum of target
    loss[t]      = KL(p || softmax(scores[t]))                                         both over the same keys

`indexer_kl` is over the selected keys (training), `dense_indexer_kl` over every visible one (warm-up). Each gives loss
and gradients in one call; `kl_gradients.py` joins it with its target, `loss.py` ties them to autograd. Kernels are in
`kl_triton.py` and `dense_kl_triton.py`.
"""

from typing import Any

import torch
from torch import Tensor

from .._op import Values, operator
from .._tracing import is_readable
from .indexer import check_bounds, check_indexer, chunks, full_bounds, index_scores, visible_keys, wide_dtype


def check_attention(name: str, q: Tensor, lse: Tensor) -> None:
    if q.dim() != 3 or not q.is_floating_point():
        raise ValueError(f"{name}: q is {list(q.shape)} {q.dtype}, expected [T, H, D] floating point")
    if lse.shape != q.shape[:2] or lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: lse is {list(lse.shape)} {lse.dtype}, expected {list(q.shape[:2])} torch.float32")


def check_kl_indices(name: str, indices: Tensor, num_queries: int, num_keys: int) -> None:
    if indices.dim() != 2 or indices.shape[0] != num_queries or indices.dtype != torch.int32:
        raise ValueError(
            f"{name}: indices is {list(indices.shape)} {indices.dtype}, expected [{num_queries}, K] torch.int32"
        )
    if is_readable(indices) and indices.numel() and (int(indices.max()) >= num_keys or int(indices.min()) < -1):
        raise ValueError(
            f"{name}: indices go from {int(indices.min())} to {int(indices.max())}, expected -1 to {num_keys - 1}"
        )


# ---- targets


def _check_target(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, scale: float) -> None:
    check_attention("indexer_target", q, lse)
    if k.dim() != 3 or k.shape[1:] != (1, q.shape[2]) or k.dtype != q.dtype:
        raise ValueError(f"indexer_target: k is {list(k.shape)} {k.dtype}, expected [S, 1, {q.shape[2]}] {q.dtype}")
    check_kl_indices("indexer_target", indices, q.shape[0], k.shape[0])


def _fake_target(q: Tensor, indices: Tensor, **_: object) -> Tensor:
    return q.new_empty(indices.shape, dtype=wide_dtype(q))


def gathered(k: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of k by index, zero where it is -1, and which are there."""
    valid = indices >= 0
    rows = k[indices.clamp_min(0).long()] if k.shape[0] else k.new_zeros(*indices.shape, *k.shape[1:])
    return rows.masked_fill(~valid.unsqueeze(-1), 0), valid


def _target_flops(values: Values) -> int:
    return 2 * values["indices"].numel() * values["q"].shape[1] * values["q"].shape[2]


@operator(check=_check_target, forward_only=True, fake=_fake_target, flops=_target_flops)
def indexer_target(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, scale: float) -> Tensor:
    """target[t, i] = sum over heads h of exp(scale * q[t, h] . k[s] - lse[t, h]), s = indices[t, i]; 0 where s is -1.

    q: [T, H, D] and k: [S, 1, D], one key head shared by all (absorbed MLA), bf16, fp16 or fp32; indices: [T, K]
    int32; lse: [T, H] fp32, natural logarithm, as `sparse_attention` gives it; target: [T, K] fp32. Not normalised:
    sums of several ranks' heads may be added first, and no head is weighed on its own. Products and sums in fp32. No
    gradient: the main model does not learn from the indexer.
    """
    wide = wide_dtype(q)
    target = torch.empty(indices.shape, dtype=wide, device=q.device)
    for rows in chunks(q.shape[0], indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys, valid = gathered(k[:, 0], indices[rows])
        logits = torch.einsum("thd,tkd->thk", q[rows].to(wide), keys.to(wide)) * scale - lse[rows].to(wide).unsqueeze(
            -1
        )
        target[rows] = logits.exp().sum(1).masked_fill(~valid, 0)
    return target


def _check_dense_target(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
) -> None:
    check_attention("dense_indexer_target", q, lse)
    if k.dim() != 3 or k.shape[2] != q.shape[2] or q.shape[1] % max(1, k.shape[1]) or k.dtype != q.dtype:
        raise ValueError(
            f"dense_indexer_target: k is {list(k.shape)} {k.dtype}, expected [S, HK, {q.shape[2]}] {q.dtype} with HK "
            f"dividing {q.shape[1]}"
        )
    check_bounds("dense_indexer_target", q.shape[0], k.shape[0], starts, ends, key_positions)


def _fake_dense_target(q: Tensor, k: Tensor, **_: object) -> Tensor:
    return q.new_empty(q.shape[0], k.shape[0], dtype=wide_dtype(q))


def _dense_target_flops(values: Values) -> int:
    return 2 * values["q"].numel() * values["k"].shape[0]


@operator(check=_check_dense_target, forward_only=True, fake=_fake_dense_target, flops=_dense_target_flops)
def dense_indexer_target(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """target[t, s] = sum over heads of exp(scale * q[t, h] . k[s, h'] - lse[t, h]); 0 where t does not see s.

    q: [T, H, D]; k: [S, HK, D], head h looks at h' = h // (H / HK); lse: [T, H] fp32, natural logarithm; target: [T,
    S] fp32. Bounds as in `index_scores`. Meant for a chunk of queries at a time. No gradient.
    """
    wide = wide_dtype(q)
    visible = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
    target = torch.zeros(q.shape[0], k.shape[0], dtype=wide, device=q.device)
    for head in range(q.shape[1]):
        keys = k[:, head // (q.shape[1] // k.shape[1])].to(wide)
        target += torch.exp(q[:, head].to(wide) @ keys.T * scale - lse[:, head, None].to(wide))
    return target.masked_fill(~visible, 0)


# ---- losses and gradients


def row_divergence(scores: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """KL of each row and its derivative by the scores; a row without keys or without mass has none of either."""
    mass = target.sum(-1, keepdim=True)
    p = target / torch.where(mass > 0, mass, 1)
    counted = valid & (mass > 0)
    log_q = torch.log_softmax(scores.masked_fill(~counted, -torch.inf), -1)
    log_q = torch.where(counted, log_q, 0)
    loss = (torch.xlogy(p, p) - p * log_q).sum(-1)
    return loss, torch.where(counted, log_q.exp() - p, 0)


def _rounded(ddots: Tensor, dtype: torch.dtype) -> Tensor:
    """As the second factor of a matrix product in `dtype`. Far below 1, so fp16 gets them 1024 times as large."""
    lift = 1024.0 if dtype == torch.float16 else 1.0
    return (ddots * lift).to(dtype).to(ddots.dtype) / lift


def _check_kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    grad_scale: float,
    deterministic: bool,
) -> None:
    check_indexer("indexer_kl", q, k, weights)
    check_kl_indices("indexer_kl", indices, q.shape[0], k.shape[0])
    if target.shape != indices.shape or target.dtype != wide_dtype(q):
        raise ValueError(
            f"indexer_kl: target is {list(target.shape)} {target.dtype}, expected {list(indices.shape)} {wide_dtype(q)}"
        )


def _fake_kl(q: Tensor, k: Tensor, weights: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = wide_dtype(q)
    loss, dk = q.new_empty(q.shape[:1], dtype=wide), k.new_empty(k.shape, dtype=wide)
    return loss, q.new_empty(q.shape), dk, weights.new_empty(weights.shape)


def _kl_flops(values: Values) -> int:
    """Scores, dq and dk; the scores are computed twice and counted once."""
    return 6 * values["indices"].numel() * values["q"].shape[1] * values["q"].shape[2]


@operator(check=_check_kl, forward_only=True, fake=_fake_kl, flops=_kl_flops)
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
    """KL(target / sum || softmax(scores)) over the selected keys of each query, and its gradients, in one call.

    q: [T, HI, D], k: [S, D], weights: [T, HI] as in `index_scores`; indices: [T, K] int32, -1 for none; target: [T,
    K] fp32, not negative, of any sum. Returns loss [T] fp32 and the derivatives of grad_scale * loss.sum(): dq and
    dweights like q and weights, dk [S, D] fp32, left wide because sums over more queries may follow. Scores, softmax
    and sums in fp32; the derivative by a product q . k is rounded to q's dtype before it is multiplied again. A query
    without keys, or whose target is all zero, has loss 0 and no gradient; an absent key is not read. `deterministic`
    adds dk in a fixed order, at the price of a pass over all keys.
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
        ddots = _rounded(dscores.unsqueeze(1) * factors.unsqueeze(-1) * (dots > 0), q.dtype)
        dq[rows] = (grad_scale * torch.einsum("thk,tkd->thd", ddots, keys)).to(q.dtype)
        dweights[rows] = (grad_scale * torch.einsum("thk,tk->th", dots.relu(), dscores)).to(weights.dtype)
        if k.shape[0]:
            each = torch.einsum("thk,thd->tkd", ddots, queries)
            dk.index_add_(0, indices[rows].clamp_min(0).flatten().long(), each.flatten(0, 1))
    return loss, dq, grad_scale * dk, dweights


def _check_dense_kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
    grad_scale: float,
) -> None:
    check_indexer("dense_indexer_kl", q, k, weights)
    expected = (q.shape[0], k.shape[0])
    if target.shape != expected or target.dtype != wide_dtype(q):
        raise ValueError(
            f"dense_indexer_kl: target is {list(target.shape)} {target.dtype}, "
            f"expected {list(expected)} {wide_dtype(q)}"
        )
    check_bounds("dense_indexer_kl", q.shape[0], k.shape[0], starts, ends, key_positions)


def _dense_kl_flops(values: Values) -> int:
    return 6 * values["target"].numel() * values["q"].shape[1] * values["q"].shape[2]


@operator(check=_check_dense_kl, forward_only=True, fake=_fake_kl, flops=_dense_kl_flops)
def dense_indexer_kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`indexer_kl` over every key a query sees: for the warm-up stage, a chunk of queries at a time.

    target: [T, S] fp32, 0 where t does not see s; the rest as in `indexer_kl`, bounds as in `index_scores`. Two
    matrices [T, S] are all that is in memory beside the results. dk is always added in a fixed order.
    """
    wide = wide_dtype(q)
    valid = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
    scores = index_scores.reference(q, k, weights, starts, ends, key_positions)
    loss, dscores = row_divergence(scores, target, valid)
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    dk, keys = torch.zeros(k.shape, dtype=wide, device=q.device), k.to(wide)
    for head in range(q.shape[1]):
        queries, factors = q[:, head].to(wide), weights[:, head, None].to(wide)
        dots = queries @ keys.T
        ddots = _rounded(dscores * factors * (dots > 0), q.dtype)
        dq[:, head] = (grad_scale * ddots @ keys).to(q.dtype)
        dweights[:, head] = (grad_scale * (dots.relu() * dscores).sum(-1)).to(weights.dtype)
        dk += ddots.T @ queries
    return loss, dq, grad_scale * dk, dweights


# ---- backends


def triton_reason(q: Tensor, **_: object) -> str | None:
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    if q.shape[1] > 128 or q.shape[2] > 256:
        return f"{q.shape[1]} heads of {q.shape[2]} channels do not fit one program (128 of 256)"
    return None


def triton_target_reason(q: Tensor, **_: object) -> str | None:
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if q.shape[2] <= 1024 else f"a head of {q.shape[2]} channels does not fit one program (1024)"


@indexer_target.impl("triton", accepts=triton_target_reason)
def _(q, k, indices, lse, scale):  # type: ignore[no-untyped-def]
    from . import kl_triton

    return kl_triton.target(q, k[:, 0], indices, lse, scale)


@dense_indexer_target.impl("triton", accepts=triton_target_reason)
def _(q, k, lse, scale, starts, ends, key_positions):  # type: ignore[no-untyped-def]
    from . import dense_kl_triton

    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    return dense_kl_triton.target(q, k, lse, scale, starts, ends, key_positions)


@indexer_kl.impl("triton", accepts=triton_reason)
def _(q, k, weights, indices, target, grad_scale, deterministic):  # type: ignore[no-untyped-def]
    from . import kl_triton

    return kl_triton.kl(q, k, weights, indices, target, grad_scale, deterministic)


@dense_indexer_kl.impl("triton", accepts=triton_reason)
def _(q, k, weights, target, starts, ends, key_positions, grad_scale):  # type: ignore[no-untyped-def]
    from . import dense_kl_triton

    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    return dense_kl_triton.kl(q, k, weights, target, starts, ends, key_positions, grad_scale)


# ---- cases

_CASES: list[Values] = [
    {"tokens": (1,), "keys": 1, "heads": 1, "dim": 8, "k": 1},
    {"tokens": (7,), "keys": 37, "heads": 4, "dim": 16, "k": 20},
    {"tokens": (5,), "keys": 50, "heads": 3, "dim": 24, "k": 33, "sliced": True},
    {"tokens": (0,), "keys": 9, "heads": 2, "dim": 8, "k": 4},
    {"tokens": (4,), "keys": 3, "heads": 8, "dim": 32, "k": 64},
    {"tokens": (6,), "keys": 40, "heads": 5, "dim": 40, "k": 17, "scale": 0.01},
    {"tokens": (3,), "keys": 30, "heads": 20, "dim": 16, "k": 40, "empty": True},
]
# A loss is one number a query, whose error is that of a few sums: over few queries a ratio of errors is luck.
_MORE_QUERIES = {5: (45,), 3: (43,)}
_KL_CASES: list[Values] = [
    *({**case, "tokens": _MORE_QUERIES.get(case["tokens"][0], case["tokens"])} for case in _CASES),
    {"tokens": (7,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "deterministic": True, "grad_scale": 0.25},
]
_BENCH: list[Values] = [
    {"tokens": (4096,), "keys": keys, "heads": 128, "dim": 576, "k": 2048} for keys in (8192, 32768)
]
_KL_BENCH: list[Values] = [
    {"tokens": (4096,), "keys": keys, "heads": 64, "dim": 128, "k": 2048, "deterministic": exact}
    for keys, exact in ((8192, False), (32768, False), (8192, True))
]
_DENSE_BENCH: list[Values] = [{"tokens": (1024,), "keys": keys, "heads": 128, "dim": 192} for keys in (8192, 32768)]
_DENSE_KL_BENCH: list[Values] = [case | {"heads": 64, "dim": 128} for case in _DENSE_BENCH]


def _normal(*shape: int, scale: float, sliced: bool, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.randn(*shape[:-1], shape[-1] + 8 * sliced, dtype=dtype, device=device)[..., : shape[-1]]
    return scale * x if scale != 1 else x


def _make_indices(tokens: int, keys: int, k: int, empty: bool, device: str) -> Tensor:
    """Ascending, one query with fewer than the others, and, if asked, one with none."""
    chosen = torch.rand(tokens, keys, device=device).topk(min(k, keys)).indices.sort(-1).values.int()
    indices = torch.nn.functional.pad(chosen, (0, max(0, k - keys)), value=-1)
    if tokens > 1:
        indices[1, 1:] = -1
    if empty:
        indices[-1] = -1
    return indices


def make_target(
    tokens: tuple[int, ...],
    keys: int,
    heads: int,
    dim: int,
    k: int,
    empty: bool = False,
    scale: float = 1.0,
    sliced: bool = False,
    *,
    dtype: torch.dtype,
    device: str,
) -> Values:
    more: dict[str, Any] = {"scale": scale, "sliced": sliced, "dtype": dtype, "device": device}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "q": _normal(*tokens, heads, dim, **more),
        "k": _normal(keys, 1, dim, **more),
        "indices": _make_indices(tokens[0], keys, k, empty, device),
        "lse": 2 + torch.rand(*tokens, heads, device=device).to(wide),
        "scale": dim**-0.5,
    }


def make_kl(grad_scale: float = 1.0, deterministic: bool = False, **case: Any) -> Values:
    values = make_target(**case)
    tokens, heads = values["q"].shape[:2]
    weights = torch.randn(tokens, heads, device=case["device"]).to(case["dtype"]) * heads**-0.5
    target = torch.rand(values["indices"].shape, device=case["device"]).to(values["lse"].dtype).square()
    target = target.masked_fill(values["indices"] < 0, 0)
    options = {"grad_scale": grad_scale, "deterministic": deterministic}
    return {
        "q": values["q"],
        "k": values["k"][:, 0],
        "weights": weights,
        "indices": values["indices"],
        "target": target,
    } | options


def _make_dense(empty: bool = False, shuffled: bool = False, k: int = 1, **case: Any) -> tuple[Values, Values]:
    values = make_target(k=1, **case)
    tokens, keys, device = values["q"].shape[0], values["k"].shape[0], case["device"]
    bounds: Values = {"starts": None, "ends": None, "key_positions": None}
    if empty or shuffled:
        ends = torch.arange(tokens, dtype=torch.int32, device=device) * max(
            1, keys // max(1, tokens)
        )  # the first: none
        bounds |= {"starts": torch.zeros_like(ends), "ends": ends}
    if shuffled:
        bounds["key_positions"] = torch.randperm(keys, device=device).int()
    return values, bounds


def make_dense_target(key_heads: int = 1, **case: Any) -> Values:
    values, bounds = _make_dense(**case)
    heads = values["q"].shape[1]
    shape = (values["k"].shape[0], heads // max(1, heads // key_heads) if heads % key_heads == 0 else 1, case["dim"])
    k = values["k"].expand(shape) + torch.arange(shape[1], device=case["device"]).to(case["dtype"])[:, None] / 8
    return {"q": values["q"], "k": k, "lse": values["lse"], "scale": values["scale"], **bounds}


def make_dense_kl(grad_scale: float = 1.0, **case: Any) -> Values:
    values, bounds = _make_dense(**case)
    q, k = values["q"], values["k"][:, 0]
    weights = torch.randn(q.shape[:2], device=case["device"]).to(case["dtype"]) * q.shape[1] ** -0.5
    target = torch.rand(q.shape[0], k.shape[0], device=case["device"]).to(values["lse"].dtype).square()
    visible = visible_keys(q.shape[0], k.shape[0], **bounds, device=q.device)
    target = target.masked_fill(~visible, 0)
    return {"q": q, "k": k, "weights": weights, "target": target, **bounds, "grad_scale": grad_scale}


_DENSE_CASES: list[Values] = [
    *_CASES,
    {"tokens": (5,), "keys": 30, "heads": 4, "dim": 16, "shuffled": True},
    {"tokens": (20,), "keys": 20, "heads": 2, "dim": 16},
]

indexer_target.inputs(cases=_CASES, bench=_BENCH)(make_target)
indexer_kl.inputs(cases=_KL_CASES, bench=_KL_BENCH)(make_kl)
dense_indexer_target.inputs(
    cases=[*_DENSE_CASES, {"tokens": (5,), "keys": 30, "heads": 4, "dim": 24, "key_heads": 2}],
    bench=[case | {"key_heads": 128} for case in _DENSE_BENCH],
)(make_dense_target)
dense_indexer_kl.inputs(cases=_DENSE_CASES, bench=_DENSE_KL_BENCH)(make_dense_kl)
