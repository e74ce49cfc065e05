"""Test and benchmark cases of the indexer's targets, losses and gradients."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values
from .bounds import visible_keys
from .dense_kl import dense_indexer_kl, dense_indexer_target
from .kl import indexer_kl, indexer_target
from .kl_gradients import dense_indexer_kl_gradients, indexer_kl_gradients

_CASES: list[Values] = [
    {"tokens": (1,), "keys": 1, "heads": 1, "dim": 8, "k": 1},
    {"tokens": (7,), "keys": 37, "heads": 4, "dim": 16, "k": 20},
    {"tokens": (5,), "keys": 50, "heads": 3, "dim": 24, "k": 33, "sliced": True},
    {"tokens": (0,), "keys": 9, "heads": 2, "dim": 8, "k": 4},
    {"tokens": (4,), "keys": 3, "heads": 8, "dim": 32, "k": 64},
    {"tokens": (6,), "keys": 40, "heads": 5, "dim": 40, "k": 17, "scale": 0.01},
    {"tokens": (3,), "keys": 30, "heads": 20, "dim": 16, "k": 40, "empty": True},
]
# A loss is one number per query with the error of a few sums: over few queries the ratio of two errors is random.
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


def _make_indices(tokens: int, keys: int, k: int, empty: bool, device: str) -> Tensor:
    """Draw ascending indices; one query has fewer keys than the others and, with `empty`, one has none."""
    chosen = torch.rand(tokens, keys, device=device).topk(min(k, keys)).indices.sort(-1).values.int()
    indices = torch.nn.functional.pad(chosen, (0, max(0, k - keys)), value=-1)
    if tokens > 1:
        indices[1, 1:] = -1
    if empty:
        indices[-1] = -1
    return indices


def make_target(draw: Draw, tokens: Sizes, keys: int, heads: int, dim: int, k: int, empty: bool = False) -> Values:
    return {
        "q": draw.scaled(*tokens, heads, dim),
        "k": draw.scaled(keys, 1, dim),
        "indices": _make_indices(tokens[0], keys, k, empty, draw.device),
        "lse": 2 + torch.rand(*tokens, heads, device=draw.device).to(draw.wide),
        "scale": dim**-0.5,
    }


def _weights(draw: Draw, tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, heads, device=draw.device).to(draw.dtype) * heads**-0.5


def _target(draw: Draw, is_hidden: Tensor) -> Tensor:
    return torch.rand(is_hidden.shape, device=draw.device).to(draw.wide).square().masked_fill(is_hidden, 0)


def make_kl(draw: Draw, grad_scale: float = 1.0, deterministic: bool = False, **case: Any) -> Values:
    values = make_target(draw, **case)
    q, indices = values["q"], values["indices"]
    return {
        "q": q,
        "k": values["k"][:, 0],
        "weights": _weights(draw, *q.shape[:2]),
        "indices": indices,
        "target": _target(draw, indices < 0),
        "grad_scale": grad_scale,
        "deterministic": deterministic,
    }


def _make_dense(
    draw: Draw, empty: bool = False, shuffled: bool = False, k: int = 1, **case: Any
) -> tuple[Values, Values]:
    values = make_target(draw, k=1, **case)
    tokens, keys, device = values["q"].shape[0], values["k"].shape[0], draw.device
    bounds: Values = {"starts": None, "ends": None, "key_positions": None}
    if empty or shuffled:
        step = max(1, keys // max(1, tokens))
        ends = torch.arange(tokens, dtype=torch.int32, device=device) * step  # the first query sees no key
        bounds |= {"starts": torch.zeros_like(ends), "ends": ends}
    if shuffled:
        bounds["key_positions"] = torch.randperm(keys, device=device).int()
    return values, bounds


def make_dense_target(draw: Draw, key_heads: int = 1, **case: Any) -> Values:
    values, bounds = _make_dense(draw, **case)
    heads = values["q"].shape[1]
    shape = (values["k"].shape[0], heads // max(1, heads // key_heads) if heads % key_heads == 0 else 1, case["dim"])
    k = values["k"].expand(shape) + torch.arange(shape[1], device=draw.device).to(draw.dtype)[:, None] / 8
    return {"q": values["q"], "k": k, "lse": values["lse"], "scale": values["scale"], **bounds}


def make_dense_kl(draw: Draw, grad_scale: float = 1.0, **case: Any) -> Values:
    values, bounds = _make_dense(draw, **case)
    q, k = values["q"], values["k"][:, 0]
    weights = _weights(draw, *q.shape[:2])
    target = _target(draw, ~visible_keys(q.shape[0], k.shape[0], **bounds, device=q.device))
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


# ---- loss and gradients straight from the attention


def _main_case(draw: Draw, case: Values, heads: int, dim: int) -> Values:
    """Return the case of the attention's tensors: numbers of ordinary size, whatever the scale of the indexer's."""
    loss_options = ("grad_scale", "deterministic")
    sizes = {name: value for name, value in case.items() if name not in loss_options}
    return {"draw": replace(draw, scale=1.0), **sizes, "heads": heads, "dim": dim}


def _with_main_attention(values: Values, main: Values) -> Values:
    """Add the attention's tensors; it is sharper than the indexer, so that the loss has no large cancelling terms."""
    del values["target"]
    named = {"main_q": 4 * main["q"], "main_k": main["k"], "main_lse": main["lse"], "scale": main["scale"]}
    return values | named


def _make_gradients(draw: Draw, main_heads: int = 2, main_dim: int = 24, causal: bool = False, **case: Any) -> Values:
    values = _with_main_attention(make_kl(draw, **case), make_target(**_main_case(draw, case, main_heads, main_dim)))
    if causal:
        values["indices"] = _causal_choice(values["indices"], values["k"].shape[0])
    return values | {"causal": causal}


def _causal_choice(indices: Tensor, num_keys: int) -> Tensor:
    """Select the first keys of each query, as many as fit and as it sees."""
    query_keys = torch.arange(num_keys - indices.shape[0], num_keys, device=indices.device)[:, None]
    first = torch.arange(indices.shape[1], device=indices.device).expand(indices.shape)
    return torch.where(first <= query_keys, first, -1).int()


def _make_dense_gradients(
    draw: Draw, main_heads: int = 2, main_dim: int = 24, key_heads: int = 1, **case: Any
) -> Values:
    main = make_dense_target(**_main_case(draw, case, main_heads, main_dim), key_heads=key_heads)
    return _with_main_attention(make_dense_kl(draw, **case), main)


# The edge cases are those of the two halves; these have enough queries and keys for errors to be compared.
_JOINED: list[Values] = [
    {"tokens": (17,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "grad_scale": 0.25},
    {"tokens": (8,), "keys": 60, "heads": 3, "dim": 24, "k": 33, "sliced": True},
    {"tokens": (0,), "keys": 9, "heads": 2, "dim": 8, "k": 4},
    {"tokens": (16,), "keys": 40, "heads": 5, "dim": 40, "k": 17, "scale": 0.01},
    {"tokens": (16,), "keys": 30, "heads": 20, "dim": 16, "k": 40, "empty": True},
]
indexer_kl_gradients.inputs(
    cases=[
        *_JOINED,
        {"tokens": (16,), "keys": 40, "heads": 4, "dim": 16, "k": 20, "causal": True},
        {"tokens": (17,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "deterministic": True},
    ],
    bench=[{"tokens": (4096,), "keys": 8192, "heads": 64, "dim": 128, "k": 2048, "main_heads": 128, "main_dim": 576}],
)(_make_gradients)
dense_indexer_kl_gradients.inputs(
    cases=[
        *_JOINED,
        {"tokens": (16,), "keys": 30, "heads": 4, "dim": 16, "shuffled": True},
        {"tokens": (16,), "keys": 30, "heads": 4, "dim": 24, "main_heads": 4, "key_heads": 4},
    ],
    bench=[
        {"tokens": (1024,), "keys": 8192, "heads": 64, "dim": 128, "main_heads": 128, "main_dim": 192, "key_heads": 128}
    ],
)(_make_dense_gradients)
