"""Sizes that tests, the self-test and benchmarks walk, and the arguments made from them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._op import Values
from .contract import mrope, mrope_, mrope_backward, rope, rope_, rope_backward

_CASES: list[Values] = [
    {"tokens": (1,), "heads": 1, "kv_heads": 1, "dim": 2},
    {"tokens": (17,), "heads": 5, "kv_heads": 3, "dim": 128, "scale": 0.01},
    {"tokens": (3, 5), "heads": 4, "kv_heads": 2, "dim": 64, "order": "bhsd"},
    {"tokens": (7,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48},
    {"tokens": (9,), "heads": 2, "kv_heads": 2, "dim": 80, "rotary": 24, "style": "pairs", "where": "trailing"},
    {"tokens": (5,), "heads": 4, "kv_heads": 1, "dim": 64, "style": "pairs", "pairs_out": "half"},
    {"tokens": (6,), "heads": 4, "kv_heads": None, "dim": 192, "rotary": 192, "inverse": True},
    {"tokens": (0,), "heads": 4, "kv_heads": 2, "dim": 64},
    {"tokens": (33,), "heads": 4, "kv_heads": 2, "dim": 64, "sliced": True, "index": torch.int32},
]
_ROPE_CASES: list[Values] = [*_CASES, {"tokens": (11,), "heads": 2, "kv_heads": 1, "dim": 64, "looked_up": True}]
_MROPE_CASES: list[Values] = [
    {
        "sections": [24, 20, 20],
        "layout": "interleaved",
        "tokens": (17,),
        "heads": 5,
        "kv_heads": 3,
        "dim": 128,
        "scale": 0.01,
    },
    {
        "sections": [16, 24, 24],
        "layout": "chunked",
        "tokens": (3, 5),
        "heads": 4,
        "kv_heads": 2,
        "dim": 128,
        "order": "bhsd",
    },
    {
        "sections": [11, 11, 10],
        "layout": "interleaved",
        "tokens": (9,),
        "heads": 2,
        "kv_heads": 1,
        "dim": 256,
        "rotary": 64,
    },
    {
        "sections": [22, 22, 20],
        "layout": "hwt",
        "tokens": (5,),
        "heads": 4,
        "kv_heads": 1,
        "dim": 128,
        "style": "pairs",
    },
    {"sections": [8, 12, 12], "layout": "chunked", "tokens": (7,), "heads": 3, "kv_heads": 1, "dim": 64},
    {
        "sections": [16, 16, 16, 16],
        "layout": "chunked",
        "tokens": (6,),
        "heads": 4,
        "kv_heads": None,
        "dim": 128,
        "inverse": True,
    },
    {"sections": [24, 20, 20], "layout": "chunked", "tokens": (0,), "heads": 4, "kv_heads": 2, "dim": 128},
    {
        "sections": [28, 20, 16],
        "layout": "interleaved",
        "tokens": (4,),
        "heads": 2,
        "kv_heads": 2,
        "dim": 128,
        "sliced": True,
    },
    {
        "sections": [3, 1, 2],
        "layout": "interleaved",
        "tokens": (3,),
        "heads": 2,
        "kv_heads": 1,
        "dim": 12,
        "index": torch.int32,
    },
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "heads": heads, "kv_heads": 4, "dim": 128}
    for tokens, heads in ((16384, 32), (16384, 64), (1, 32), (64, 64))
]


def _table(rows: int, rotary: int, dtype: torch.dtype, device: str) -> Tensor:
    inv_freq = 1e4 ** (-torch.arange(0, rotary, 2, device=device, dtype=torch.float64) / rotary)
    angles = torch.outer(torch.arange(rows, device=device, dtype=torch.float64), inv_freq)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.cat((angles.cos(), angles.sin()), -1).to(torch.float32).to(wide)


def _heads(scale: float, tokens: tuple[int, ...], heads: int, dim: int, order: str, sliced: bool, **how: Any) -> Tensor:
    """Random heads in one of the memory layouts that a model hands over."""
    if sliced:  # a slice of a packed projection: rows further apart than they are long
        return (scale * torch.randn(*tokens, heads + 3, dim, **how))[..., 1 : heads + 1, :]
    if order == "bhsd":
        return (scale * torch.randn(tokens[0], heads, tokens[1], dim, **how)).transpose(1, 2)
    return scale * torch.randn(*tokens, heads, dim, **how)


def make(
    tokens: tuple[int, ...],
    heads: int,
    kv_heads: int | None,
    dim: int,
    rotary: int | None = None,
    scale: float = 1.0,
    order: str = "thd",
    sliced: bool = False,
    looked_up: bool = False,
    index: torch.dtype = torch.int64,
    axes: int | None = None,
    *,
    dtype: torch.dtype,
    device: str,
    **how: Any,
) -> Values:
    """Arguments of `rope`, and of `mrope` with `axes`."""
    how_made = {"dtype": dtype, "device": device}
    q = _heads(scale, tokens, heads, dim, order, sliced, **how_made)
    k = None if kv_heads is None else _heads(scale, tokens, kv_heads, dim, order, sliced, **how_made)
    rows = max(64, torch.Size(tokens).numel())
    table = _table(rows, rotary or dim, dtype, device)
    shape = tokens if axes is None else (axes, *tokens)
    positions = torch.randint(0, rows, shape, device=device, dtype=index)
    if looked_up:
        return {"q": q, "k": k, "cos_sin": table[positions], "positions": None, **how}
    return {"q": q, "k": k, "cos_sin": table, "positions": positions, **how}


def _make_mrope(sections: list[int], layout: str, **case: Any) -> Values:
    return make(axes=len(sections), **case) | {"sections": sections, "layout": layout}


def _renamed(make: Callable[..., Values]) -> Callable[..., Values]:
    """A backward takes gradients of q's and k's shapes in their place."""
    return lambda **case: {{"q": "dq", "k": "dk"}.get(n, n): v for n, v in make(**case).items()}


_MROPE_BENCH = [{**case, "sections": [24, 20, 20], "layout": "interleaved"} for case in _BENCH]
rope.inputs(cases=_ROPE_CASES, bench=_BENCH)(make)
rope_backward.inputs(cases=_ROPE_CASES, bench=_BENCH)(_renamed(make))
rope_.inputs(cases=_ROPE_CASES, bench=_BENCH)(make)
mrope.inputs(cases=_MROPE_CASES, bench=_MROPE_BENCH)(_make_mrope)
mrope_backward.inputs(cases=_MROPE_CASES, bench=_MROPE_BENCH)(_renamed(_make_mrope))
mrope_.inputs(cases=_MROPE_CASES, bench=_MROPE_BENCH)(_make_mrope)
