"""Test and benchmark cases of the indexer's targets, losses and gradients; those without `k` have no indices."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values
from .bounds import visible_keys
from .kl import indexer_kl, indexer_kl_gradients, indexer_target

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
def _with_more_queries(cases: list[Values], tokens: dict[int, int]) -> list[Values]:
    """Return the cases with other numbers of tokens, by their number."""
    return [{**case, "tokens": tuple(tokens.get(count, count) for count in case["tokens"])} for case in cases]


_KL_CASES: list[Values] = [
    *_with_more_queries(_CASES, {5: 45, 3: 43}),
    {"tokens": (7,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "deterministic": True, "grad_scale": 0.25},
]


def _without_indices(cases: list[Values]) -> list[Values]:
    """Return the same cases over every visible key."""
    return [{name: value for name, value in case.items() if name != "k"} for case in cases]


_DENSE_CASES: list[Values] = [
    *_without_indices(_CASES),
    {"tokens": (5,), "keys": 30, "heads": 4, "dim": 16, "shuffled": True},
    {"tokens": (20,), "keys": 20, "heads": 2, "dim": 16},
]
_SIZES = (8192, 32768)
_DENSE_BENCH: list[Values] = [{"tokens": (1024,), "keys": keys, "heads": 128, "dim": 192} for keys in _SIZES]


def _make_indices(tokens: int, keys: int, k: int, empty: bool, device: str) -> Tensor:
    """Draw ascending indices; one query has fewer keys than the others and, with `empty`, one has none."""
    chosen = torch.rand(tokens, keys, device=device).topk(min(k, keys)).indices.sort(-1).values.int()
    indices = torch.nn.functional.pad(chosen, (0, max(0, k - keys)), value=-1)
    if tokens > 1:
        indices[1, 1:] = -1
    if empty:
        indices[-1] = -1
    return indices


def _make_selection(
    draw: Draw, tokens: tuple[int], keys: int, k: int | None, empty: bool = False, shuffled: bool = False
) -> Values:
    """Draw the keys of each query: `k` of them, or without `k` those within bounds.

    Bounds, drawn only for `empty` or `shuffled`, are of increasing numbers of keys, 0 at first.
    """
    if k is not None:
        return {"indices": _make_indices(*tokens, keys, k, empty, draw.device)}
    if not empty and not shuffled:
        return {}
    ends = torch.arange(*tokens, dtype=torch.int32, device=draw.device) * max(1, keys // max(1, *tokens))
    positions = torch.randperm(keys, device=draw.device).int() if shuffled else None
    return {"starts": torch.zeros_like(ends), "ends": ends, "key_positions": positions}


def make_target(
    draw: Draw,
    tokens: tuple[int],
    keys: int,
    heads: int,
    dim: int,
    k: int | None = None,
    key_heads: int = 1,
    **selection: bool,
) -> Values:
    key = draw.scaled(keys, 1, dim)
    offsets = torch.arange(key_heads, device=draw.device).to(draw.dtype)[:, None] / 8
    return {
        "q": draw.scaled(*tokens, heads, dim),
        "k": key if key_heads == 1 else key.expand(keys, key_heads, dim) + offsets,
        **_make_selection(draw, tokens, keys, k, **selection),
        "lse": 2 + torch.rand(*tokens, heads, device=draw.device).to(draw.wide),
        "scale": dim**-0.5,
    }


def make_kl(
    draw: Draw,
    tokens: tuple[int],
    keys: int,
    heads: int,
    dim: int,
    k: int | None = None,
    empty: bool = False,
    shuffled: bool = False,
) -> Values:
    values = _make_selection(draw, tokens, keys, k, empty, shuffled)
    if k is None:
        bounds: Values = {name: values.get(name) for name in ("starts", "ends", "key_positions")}
        is_hidden = ~visible_keys(*tokens, keys, **bounds, device=torch.device(draw.device))
    else:
        is_hidden = values["indices"] < 0
    weights = torch.randn(*tokens, heads, device=draw.device).to(draw.dtype) * heads**-0.5
    target = torch.rand(is_hidden.shape, device=draw.device).to(draw.wide).square().masked_fill(is_hidden, 0)
    q, key = draw.scaled(*tokens, heads, dim), draw.scaled(keys, dim)
    return {"q": q, "k": key, "weights": weights, "target": target, **values}


indexer_target.inputs(
    cases=[*_CASES, *_DENSE_CASES, {"tokens": (5,), "keys": 30, "heads": 4, "dim": 24, "key_heads": 2}],
    bench=[
        *({"tokens": (4096,), "keys": keys, "heads": 128, "dim": 576, "k": 2048} for keys in _SIZES),
        *(case | {"key_heads": 128} for case in _DENSE_BENCH),
    ],
)(make_target)
_KL = {"tokens": (4096,), "heads": 64, "dim": 128, "k": 2048}
indexer_kl.inputs(
    cases=[
        *_KL_CASES,
        *_with_more_queries(_DENSE_CASES[1:], {3: 28, 5: 28, 6: 28}),
    ],  # over one key a loss is 0, or the error of a division
    bench=[
        *(
            _KL | {"keys": keys, "deterministic": exact}
            for keys, exact in ((8192, False), (32768, False), (8192, True))
        ),
        *(case | {"heads": 64, "dim": 128} for case in _DENSE_BENCH),
    ],
)(make_kl)


# ---- loss and gradients straight from the attention


def _make_gradients(
    draw: Draw, main_heads: int = 2, main_dim: int = 24, key_heads: int = 1, causal: bool = False, **case: Any
) -> Values:
    """Draw the indexer's tensors and the attention's, of ordinary size whatever the scale of the indexer's.

    The attention is sharper than the indexer, so that the loss has no large cancelling terms.
    """
    values = indexer_kl.draw(draw, **case)
    sizes: Values = {"heads": main_heads, "dim": main_dim, "key_heads": key_heads}
    main = make_target(replace(draw, scale=1.0), tokens=case["tokens"], keys=case["keys"], **sizes)
    values |= {"main_q": 4 * main["q"], "main_k": main["k"], "main_lse": main["lse"], "scale": main["scale"]}
    if causal and values["indices"] is not None:
        values["indices"] = _causal_choice(values["indices"], values["k"].shape[0])
    return values | {"causal": causal}


def _causal_choice(indices: Tensor, num_keys: int) -> Tensor:
    """Select the first keys of each query, as many as fit and as it sees."""
    query_keys = torch.arange(num_keys - indices.shape[0], num_keys, device=indices.device)[:, None]
    first = torch.arange(indices.shape[1], device=indices.device).expand(indices.shape)
    return torch.where(first <= query_keys, first, -1).int()


# The edge cases are those of the two halves; these have enough queries and keys for errors to be compared.
_JOINED: list[Values] = [
    {"tokens": (17,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "grad_scale": 0.25},
    {"tokens": (8,), "keys": 60, "heads": 3, "dim": 24, "k": 33, "sliced": True},
    {"tokens": (0,), "keys": 9, "heads": 2, "dim": 8, "k": 4},
    {"tokens": (16,), "keys": 40, "heads": 5, "dim": 40, "k": 17, "scale": 0.01},
    {"tokens": (16,), "keys": 30, "heads": 20, "dim": 16, "k": 40, "empty": True},
]
_JOINED_BENCH: Values = {"heads": 64, "dim": 128, "main_heads": 128}
indexer_kl_gradients.inputs(
    cases=[
        *_JOINED,
        {"tokens": (16,), "keys": 40, "heads": 4, "dim": 16, "k": 20, "causal": True},
        {"tokens": (17,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "deterministic": True},
        *_without_indices(_JOINED),
        {"tokens": (16,), "keys": 30, "heads": 4, "dim": 16, "shuffled": True},
        {"tokens": (16,), "keys": 30, "heads": 4, "dim": 24, "main_heads": 4, "key_heads": 4},
    ],
    bench=[
        {"tokens": (4096,), "keys": 8192, "k": 2048, "main_dim": 576, **_JOINED_BENCH},
        {"tokens": (1024,), "keys": 8192, "main_dim": 192, "key_heads": 128, **_JOINED_BENCH},
    ],
)(_make_gradients)
