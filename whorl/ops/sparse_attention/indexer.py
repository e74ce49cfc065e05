"""The lightning indexer: which keys each query of DeepSeek sparse attention looks at.

`index_scores` and `top_k` are its two halves; `lightning_indexer` runs them a chunk of queries at a time, so that no
[T, S] matrix is ever whole in memory. Kernels are in `indexer_triton.py` and `top_k_triton.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whorl.contracts import lightning_indexer_limit

from .. import _torch_npu
from .._op import Values, operator
from .._torch_npu import dtype_name
from ..rope import rope

CHUNK = 2**25  # scores of one chunk: 128 MiB in fp32


def causal_bounds(
    num_queries: int,
    num_keys: int,
    *,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor]:
    """`starts` and `ends` of causal attention: query t sees the keys whose position is in [starts[t], ends[t]).

    positions: [T] places of the queries in the packed stream, for a rank that holds a slice of it; by default the
    last T of the S. cu_seqlens: [B + 1] where the packed sequences begin, the total last; by default one sequence.
    """
    if cu_seqlens is not None:
        device = cu_seqlens.device
    if positions is None:
        positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    if positions.shape != (num_queries,):
        raise ValueError(f"causal_bounds: positions is {list(positions.shape)}, expected [{num_queries}]")
    ends = (positions + 1).int()
    if cu_seqlens is None:
        return torch.zeros_like(ends), ends
    sequence = torch.searchsorted(cu_seqlens.long(), positions.long(), right=True) - 1
    return cu_seqlens.to(positions.device)[sequence].int(), ends


def indexer_rope(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn the first R channels of the indexer's queries [T, HI, D] and of its one key head [T, D].

    DeepSeek-V3.2 pairs channel i with i + R/2 here, unlike its attention, which pairs neighbours at the end of the
    head; GLM's indexer is `interleaved`. cos_sin and positions as in `rope`.
    """
    turned_q, turned_k = rope(q, k.unsqueeze(-2), cos_sin, positions, style="pairs" if interleaved else "half")
    return turned_q, turned_k.squeeze(-2)


# ---- who sees whom


def check_bounds(
    name: str, num_queries: int, num_keys: int, starts: Tensor | None, ends: Tensor | None, positions: Tensor | None
) -> None:
    for what, x, size in (
        ("starts", starts, num_queries),
        ("ends", ends, num_queries),
        ("key_positions", positions, num_keys),
    ):
        if x is not None and (x.shape != (size,) or x.dtype != torch.int32):
            raise ValueError(f"{name}: {what} is {list(x.shape)} {x.dtype}, expected [{size}] torch.int32")
    if ends is None and (starts is not None or positions is not None):
        raise ValueError(f"{name}: starts or key_positions without ends; causal_bounds gives both bounds")


def full_bounds(
    num_queries: int, num_keys: int, starts: Tensor | None, ends: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Bounds as tensors; without `ends` causal, the last query at the last key."""
    if ends is None:
        ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, dtype=torch.int32, device=device)
    return torch.zeros_like(ends) if starts is None else starts, ends


def visible_keys(
    num_queries: int,
    num_keys: int,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
    device: torch.device,
) -> Tensor:
    """[T, S] bool."""
    starts, ends = full_bounds(num_queries, num_keys, starts, ends, device)
    if key_positions is None:
        key_positions = torch.arange(num_keys, device=device)
    return (key_positions >= starts[:, None]) & (key_positions < ends[:, None])


def chunks(num_rows: int, row_size: int, budget: int = CHUNK) -> Iterator[slice]:
    """Row ranges of at most `budget` elements each, at least one row."""
    step = max(1, budget // max(1, row_size))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


# ---- scores


def check_indexer(name: str, q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None = None) -> None:
    if q.dim() != 3 or not q.is_floating_point():
        raise ValueError(f"{name}: q is {list(q.shape)} {q.dtype}, expected [T, HI, D] floating point")
    if k.dim() != 2 or k.shape[1] != q.shape[2] or k.dtype != q.dtype:
        raise ValueError(f"{name}: k is {list(k.shape)} {k.dtype}, expected [S, {q.shape[2]}] {q.dtype}")
    if weights.shape != q.shape[:2] or not weights.is_floating_point():
        raise ValueError(f"{name}: weights is {list(weights.shape)} {weights.dtype}, expected {list(q.shape[:2])}")
    if k_scale is not None and (k_scale.shape != k.shape[:1] or not k_scale.is_floating_point()):
        raise ValueError(f"{name}: k_scale is {list(k_scale.shape)} {k_scale.dtype}, expected [{k.shape[0]}]")


def _check_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
    k_scale: Tensor | None,
) -> None:
    check_indexer("index_scores", q, k, weights, k_scale)
    check_bounds("index_scores", q.shape[0], k.shape[0], starts, ends, key_positions)


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake_scores(q: Tensor, k: Tensor, **_: object) -> Tensor:
    return q.new_empty(q.shape[0], k.shape[0], dtype=wide_dtype(q))


def scoring_flops(values: Values) -> int:
    """Of the pairs of the causal default; given bounds may hide more."""
    num_queries, heads, dim = values["q"].shape
    first = values["k"].shape[0] - num_queries + 1
    return 2 * heads * dim * sum(max(0, first + t) for t in range(num_queries))


@operator(check=_check_scores, forward_only=True, fake=_fake_scores, flops=scoring_flops)
def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """scores[t, s] = sum over heads h of weights[t, h] * max(0, q[t, h] . k[s]), 0 where t does not see s.

    q: [T, HI, D] and k: [S, D], both bf16, fp16, fp32 or float8_e4m3fn; weights: [T, HI] floating point; k_scale:
    [S], multiplied last (fp8 keys); scores: [T, S] fp32. Query t sees the keys s with starts[t] <= key_positions[s] <
    ends[t], all int32; key_positions defaults to 0, 1, ..., and the bounds to causal, the last query at the last key.
    Products and sums in fp32, of fp8 as the device adds it (14 bits on Hopper). Any constant factor (HI^-0.5 *
    D^-0.5) belongs into the weights. For fp8 scores quantise q and k with `dynamic_quant`, multiply the weights by q's
    scales and give k's as k_scale. No gradient: `indexer_kl_loss` trains what is scored here.
    """
    wide, keys, factors = (x.to(wide_dtype(q)) for x in (q, k, weights))
    scores = torch.empty(q.shape[0], k.shape[0], dtype=wide.dtype, device=q.device)
    for rows in chunks(q.shape[0], q.shape[1] * k.shape[0]):
        dots = torch.einsum("thd,sd->ths", wide[rows], keys).relu_()
        scores[rows] = torch.einsum("ths,th->ts", dots, factors[rows])
    if k_scale is not None:
        scores = scores * k_scale.to(scores.dtype)
    visible = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
    return scores.masked_fill(~visible, 0.0)


# ---- selection


def _check_topk(name: str, topk: int) -> None:
    if topk < 1:
        raise ValueError(f"{name}: topk is {topk}, expected at least 1")


def _check_top_k(
    scores: Tensor, topk: int, starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None
) -> None:
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"top_k: scores is {list(scores.shape)} {scores.dtype}, expected [T, S] torch.float32")
    _check_topk("top_k", topk)
    check_bounds("top_k", scores.shape[0], scores.shape[1], starts, ends, key_positions)


def _fake_top_k(scores: Tensor, topk: int, **_: object) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], topk)
    return scores.new_empty(shape, dtype=torch.int32), scores.new_empty(shape)


@operator(check=_check_top_k, forward_only=True, fake=_fake_top_k)
def top_k(
    scores: Tensor,
    topk: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `topk` highest of the scores each query sees: (indices [T, topk] int32 ascending, their scores).

    scores: [T, S] fp32; bounds and key_positions as in `index_scores`. Equal scores go to the lowest index (0.0 and
    -0.0 are equal, NaN is taken for minus infinity), so the answer is one and the same everywhere. A query that sees
    fewer than topk keys gets all of them; what is left at the end is index -1, score 0. No gradient.
    """
    num_queries, num_keys = scores.shape
    visible = visible_keys(num_queries, num_keys, starts, ends, key_positions, scores.device)
    comparable = torch.where(scores.isnan(), -torch.inf, scores) + 0.0  # -0.0 becomes 0.0
    order = torch.sort(comparable, dim=-1, descending=True, stable=True).indices
    seen_first = torch.sort((~visible).gather(1, order).byte(), dim=-1, stable=True).indices
    order = order.gather(1, seen_first)[:, :topk]
    is_real = torch.arange(order.shape[1], device=scores.device) < visible.sum(1, keepdim=True)
    order = torch.sort(torch.where(is_real, order, num_keys), dim=-1).values
    values = comparable.gather(1, order.clamp_max(max(0, num_keys - 1))) if num_keys else scores
    indices = torch.where(order < num_keys, order, -1).int()
    values = torch.where(order < num_keys, values, 0.0)
    padding = (0, topk - order.shape[1])
    return torch.nn.functional.pad(indices, padding, value=-1), torch.nn.functional.pad(values, padding)


# ---- both


def _check_lightning(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
    k_scale: Tensor | None,
    with_scores: bool,
) -> None:
    check_indexer("lightning_indexer", q, k, weights, k_scale)
    check_bounds("lightning_indexer", q.shape[0], k.shape[0], starts, ends, key_positions)
    _check_topk("lightning_indexer", topk)


def _fake_lightning(q: Tensor, topk: int, with_scores: bool, **_: object) -> tuple[Tensor, Tensor | None]:
    shape = (q.shape[0], topk)
    scores = q.new_empty(shape, dtype=wide_dtype(q)) if with_scores else None
    return q.new_empty(shape, dtype=torch.int32), scores


@operator(
    check=_check_lightning,
    forward_only=True,
    absent={1: "with_scores"},
    fake=_fake_lightning,
    flops=scoring_flops,
)
def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    k_scale: Tensor | None = None,
    with_scores: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`top_k` of `index_scores`: (indices [T, topk] int32 ascending, -1 at the end; scores [T, topk] fp32).

    Arguments as there; the scores of a chunk of queries are all that is in memory. Indices are rows of k: with
    key_positions out of order the tie rule follows the rows, so gathered keys should lie in the order of their
    positions. Packed sequences and slices of a longer one are a matter of the bounds: see `causal_bounds`. with_scores
    False: None in place of the scores, for who needs the choice alone. Ascend's kernel rounds them to q's dtype, so
    there they are computed again, by plain torch. No gradient.
    """
    found = []
    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    for rows in chunks(q.shape[0], k.shape[0]):
        bounds = (starts[rows], ends[rows], key_positions)
        scores = index_scores.reference(q[rows], k, weights[rows], *bounds, k_scale)
        found.append(top_k.reference(scores, topk, *bounds))
    if not found:
        return _fake_lightning(q, topk, with_scores)
    return torch.cat([i for i, _ in found]), torch.cat([v for _, v in found]) if with_scores else None


# ---- backends


def _triton_reason(q: Tensor, topk: int = 1, **_: object) -> str | None:
    from .top_k_triton import MOST

    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    if q.shape[1] > 128 or q.shape[2] > 256:
        return f"{q.shape[1]} heads of {q.shape[2]} channels do not fit one program (128 of 256)"
    return None if topk <= MOST else f"topk {topk} does not fit one program ({MOST})"


def _triton_top_k_reason(scores: Tensor, topk: int, **_: object) -> str | None:
    from .top_k_triton import MOST

    if scores.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if topk <= MOST else f"topk {topk} does not fit one program ({MOST})"


@index_scores.impl("triton", accepts=_triton_reason)
def _(q, k, weights, starts, ends, key_positions, k_scale):  # type: ignore[no-untyped-def]
    from . import indexer_triton

    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    return indexer_triton.index_scores(q, k, weights, starts, ends, key_positions, k_scale)


@top_k.impl("triton", accepts=_triton_top_k_reason)
def _(scores, topk, starts, ends, key_positions):  # type: ignore[no-untyped-def]
    from . import top_k_triton

    return top_k_triton.forward(scores, topk, starts, ends, key_positions)


@lightning_indexer.impl("triton", accepts=_triton_reason)
def _(q, k, weights, topk, starts, ends, key_positions, k_scale, with_scores):  # type: ignore[no-untyped-def]
    from . import indexer_triton

    indices, scores = indexer_triton.lightning_indexer(q, k, weights, topk, starts, ends, key_positions, k_scale)
    return indices, scores if with_scores else None


def _npu_reason(
    q: Tensor,
    k: Tensor,
    topk: int,
    ends: Tensor | None,
    key_positions: Tensor | None,
    k_scale: Tensor | None,
    **_: object,
) -> str | None:
    if not q.numel() or not k.numel():
        return "empty tensors are not taken"
    if ends is not None or key_positions is not None or k_scale is not None:
        return "sees all keys up to the query's own; bounds, positions and scales are not taken"
    return lightning_indexer_limit(
        query_shape=q.shape,
        key_shape=(k.shape[0], 1, k.shape[1]),
        dtype=dtype_name(q),
        sparse_count=topk,
        sparse_mode=3,
    )


@lightning_indexer.impl("torch_npu", accepts=_npu_reason)
def _(q, k, weights, topk, starts, ends, key_positions, k_scale, with_scores):  # type: ignore[no-untyped-def]
    """Sorted here, since the device does not say in which order it gives them; nor does it name its rule for ties."""
    found, _ = _torch_npu.call(
        "npu_lightning_indexer",
        query=q.unsqueeze(0).contiguous(),
        key=k[None, :, None].contiguous(),
        weights=weights.unsqueeze(0).to(q.dtype).contiguous(),
        sparse_count=topk,
        sparse_mode=3,
    )
    indices = torch.where(found[0, :, 0] < 0, k.shape[0], found[0, :, 0]).sort(-1).values
    indices = torch.where(indices < k.shape[0], indices, -1).int()
    if not with_scores:
        return indices, None
    values = q.new_empty(indices.shape, dtype=torch.float32)
    for rows in chunks(q.shape[0], topk * (q.shape[1] + q.shape[2])):  # the device's own are rounded to q's dtype
        keys = k[indices[rows].clamp_min(0).long()].float()
        dots = torch.einsum("thd,tkd->thk", q[rows].float(), keys).relu()
        values[rows] = torch.einsum("thk,th->tk", dots, weights[rows].float())
    return indices, values.masked_fill(indices < 0, 0.0)


# ---- cases

_CASES: list[Values] = [
    {"tokens": (1,), "keys": 1, "heads": 1, "dim": 8, "topk": 1},
    {"tokens": (7,), "keys": 37, "heads": 4, "dim": 16, "topk": 9},
    {"tokens": (5,), "keys": 70, "heads": 3, "dim": 24, "topk": 33, "sliced": True},
    {"tokens": (0,), "keys": 9, "heads": 2, "dim": 8, "topk": 4},
    {"tokens": (6,), "keys": 6, "heads": 8, "dim": 32, "topk": 64},
    {"tokens": (9,), "keys": 100, "heads": 5, "dim": 16, "topk": 20, "packed": (3, 1, 5), "scale": 1 / 64},
    {"tokens": (4,), "keys": 50, "heads": 16, "dim": 16, "topk": 7, "shuffled": True},
]
_DEEPSEEK = {"heads": 64, "dim": 128, "topk": 2048}
_BENCH: list[Values] = [{"tokens": (4096,), "keys": keys, **_DEEPSEEK} for keys in (8192, 32768)]


def _make(
    tokens: tuple[int, ...],
    keys: int,
    heads: int,
    dim: int,
    topk: int,
    packed: tuple[int, ...] = (),
    shuffled: bool = False,
    scale: float = 1.0,
    sliced: bool = False,
    *,
    dtype: torch.dtype,
    device: str,
) -> Values:
    """Small integers and powers of two: sums are exact in any order, so all dtypes choose the same keys."""
    more: dict[str, Any] = {"device": device}
    q = torch.randint(-2, 3, (*tokens, heads, dim + 8 * sliced), **more)[..., :dim].to(dtype)
    k = torch.randint(-2, 3, (keys, dim + 8 * sliced), **more).to(dtype)[:, :dim]
    weights = scale * torch.randint(-3, 5, (*tokens, heads), **more).to(dtype) / 8
    values: Values = {"q": q, "k": k, "weights": weights, "topk": topk}
    if packed:
        ends = torch.tensor([0, *packed]).cumsum(0)
        ends[-1] = max(keys, int(ends[-1]))
        starts, stops = causal_bounds(tokens[0], keys, cu_seqlens=ends, positions=torch.arange(*tokens) + keys // 2)
        values |= {"starts": starts.to(device), "ends": stops.to(device)}
    if shuffled:
        positions = torch.randperm(keys).int() + 3
        starts, stops = causal_bounds(tokens[0], keys, positions=torch.arange(*tokens) + keys // 2)
        values |= {"starts": starts.to(device), "ends": stops.to(device), "key_positions": positions.to(device)}
    return values


def _make_lightning(with_scores: bool = True, **case: Any) -> Values:
    return _make(**case) | ({} if with_scores else {"with_scores": False})


def _make_scores(**case: Any) -> Values:
    """Ordinary numbers: here rounding shows."""
    values = _make(**case)
    del values["topk"]
    scale = case.get("scale", 1.0)
    factors = {"q": scale, "k": 1.0, "weights": scale}
    if values["q"].device.type == "meta":
        return values
    return values | {n: (values[n] + torch.randn_like(values[n])) * f for n, f in factors.items()}


def _make_top_k(normal: bool = False, **case: Any) -> Values:
    """`normal` numbers hardly tie; otherwise nearly all do."""
    values = _make(**case)
    shape = (values.pop("q").shape[0], values.pop("k").shape[0] + 8 * case.get("sliced", False))
    values.pop("weights")
    wide = torch.float64 if case["dtype"] == torch.float64 else torch.float32
    more = {"device": case["device"]}
    scores = torch.randn(shape, **more, dtype=wide) if normal else torch.randint(-9, 9, shape, **more).to(wide) / 4
    return {"scores": scores[:, : case["keys"]], **values}


lightning_indexer.inputs(cases=[*_CASES, _CASES[1] | {"with_scores": False}], bench=_BENCH)(_make_lightning)
index_scores.inputs(cases=_CASES, bench=_BENCH)(_make_scores)
top_k.inputs(cases=_CASES, bench=[case | {"normal": kind} for kind in (True, False) for case in _BENCH])(_make_top_k)
