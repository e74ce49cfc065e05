"""Test and benchmark cases of the indexer's scores and selection."""

from dataclasses import replace
from typing import Any

import torch

from .._draw import Draw
from .._op import Values
from .bounds import causal_bounds
from .lightning import lightning_indexer
from .scores import index_scores
from .top_k import top_k

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
    draw: Draw,
    tokens: tuple[int],
    keys: int,
    heads: int,
    dim: int,
    packed: tuple[int, ...] = (),
    shuffled: bool = False,
) -> Values:
    """Make arguments of small integers and powers of two: sums are exact in any order, so all dtypes select the same.

    packed: lengths of packed sequences; shuffled: keys have positions in random order.
    """
    device, dtype = draw.device, draw.dtype
    q = torch.randint(-2, 3, (*tokens, heads, dim + draw.gap), device=device)[..., :dim].to(dtype)
    k = torch.randint(-2, 3, (keys, dim + draw.gap), device=device).to(dtype)[:, :dim]
    weights = draw.scale * torch.randint(-3, 5, (*tokens, heads), device=device).to(dtype) / 8
    values: Values = {"q": q, "k": k, "weights": weights}
    if packed or shuffled:
        lengths = None
        if packed:
            lengths = torch.tensor([0, *packed]).cumsum(0)
            lengths[-1] = max(keys, int(lengths[-1]))
        positions = torch.arange(*tokens) + keys // 2
        starts, ends = causal_bounds(tokens[0], keys, cu_seqlens=lengths, positions=positions)
        values |= {"starts": starts.to(device), "ends": ends.to(device)}
    if shuffled:
        values["key_positions"] = (torch.randperm(keys).int() + 3).to(device)
    return values


def _make_scores(draw: Draw, topk: int = 0, **case: Any) -> Values:
    """Draw normally distributed numbers, so that rounding errors show."""
    values = _make(draw, **case)
    factors = {"q": draw.scale, "k": 1.0, "weights": draw.scale}
    if values["q"].is_meta:
        return values
    return values | {n: (values[n] + torch.randn_like(values[n])) * f for n, f in factors.items()}


def _make_top_k(draw: Draw, normal: bool = False, **case: Any) -> Values:
    """Draw scores: normally distributed ones (`normal`) hardly ever tie, the others nearly always do."""
    shape, kind = (*case["tokens"], case["keys"] + draw.gap), replace(draw, dtype=draw.wide).kind
    scores = torch.randn(shape, **kind) if normal else torch.randint(-9, 9, shape, **kind) / 4
    del case["topk"]
    return {**_make(draw, **case), "scores": scores[:, : case["keys"]]}


lightning_indexer.inputs(cases=[*_CASES, _CASES[1] | {"with_scores": False}], bench=_BENCH)(_make)
index_scores.inputs(cases=_CASES, bench=_BENCH)(_make_scores)
top_k.inputs(cases=_CASES, bench=[case | {"normal": kind} for kind in (True, False) for case in _BENCH])(_make_top_k)
