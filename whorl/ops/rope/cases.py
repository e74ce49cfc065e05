"""Cases of the rotary operators for tests, the self-test and benchmarks, and the arguments made from them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._draw import Draw, Sizes
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


def _table(draw: Draw, rows: int, rotary: int) -> Tensor:
    inv_freq = 1e4 ** (-torch.arange(0, rotary, 2, device=draw.device, dtype=torch.float64) / rotary)
    angles = torch.outer(torch.arange(rows, device=draw.device, dtype=torch.float64), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), -1).to(torch.float32).to(draw.wide)


def _heads(draw: Draw, tokens: Sizes, heads: int, dim: int, order: str) -> Tensor:
    """Random heads in one of the dimension orders that models use."""
    if draw.sliced:  # a slice of a packed projection: the stride between tokens is larger than a token
        return (draw.scale * torch.randn(*tokens, heads + 3, dim, **draw.kind))[..., 1 : heads + 1, :]
    if order == "bhsd":
        return draw.scaled(tokens[0], heads, tokens[1], dim).transpose(1, 2)
    return draw.scaled(*tokens, heads, dim)


def make(
    draw: Draw,
    tokens: Sizes,
    heads: int,
    kv_heads: int | None,
    dim: int,
    rotary: int | None = None,
    order: str = "thd",
    looked_up: bool = False,
    index: torch.dtype = torch.int64,
    axes: int | None = None,
    **options: Any,
) -> Values:
    """Make the arguments of `rope` or, with `axes` rows of positions, of `mrope`.

    looked_up: cos_sin has one row per token, and positions is None; index: the dtype of positions.
    """
    q = _heads(draw, tokens, heads, dim, order)
    k = None if kv_heads is None else _heads(draw, tokens, kv_heads, dim, order)
    rows = max(64, torch.Size(tokens).numel())
    table = _table(draw, rows, rotary or dim)
    shape = tokens if axes is None else (axes, *tokens)
    positions = torch.randint(0, rows, shape, device=draw.device, dtype=index)
    if looked_up:
        return {"q": q, "k": k, "cos_sin": table[positions], "positions": None, **options}
    return {"q": q, "k": k, "cos_sin": table, "positions": positions, **options}


def _make_mrope(draw: Draw, sections: list[int], layout: str, **case: Any) -> Values:
    return make(draw, axes=len(sections), **case) | {"sections": sections, "layout": layout}


def _for_backward(make: Callable[..., Values]) -> Callable[..., Values]:
    """Rename q and k to dq and dk: a backward takes gradients of the same shapes."""
    return lambda draw, **case: {{"q": "dq", "k": "dk"}.get(n, n): v for n, v in make(draw, **case).items()}


_MROPE_BENCH = [{**case, "sections": [24, 20, 20], "layout": "interleaved"} for case in _BENCH]
rope.inputs(cases=_ROPE_CASES, bench=_BENCH)(make)
rope_backward.inputs(cases=_ROPE_CASES, bench=_BENCH)(_for_backward(make))
rope_.inputs(cases=_ROPE_CASES, bench=_BENCH)(make)
mrope.inputs(cases=_MROPE_CASES, bench=_MROPE_BENCH)(_make_mrope)
mrope_backward.inputs(cases=_MROPE_CASES, bench=_MROPE_BENCH)(_for_backward(_make_mrope))
mrope_.inputs(cases=_MROPE_CASES, bench=_MROPE_BENCH)(_make_mrope)
