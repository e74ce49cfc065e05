"""Test and benchmark cases of sparse and masked attention, and the random selections they use."""

from typing import Any

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values
from .contract import sparse_attention, sparse_attention_backward
from .masked import masked_attention, masked_attention_backward, selection_mask

MLA_SCALE = 192**-0.5  # of the heads before absorption, whose size is 192; not of the 576 absorbed channels

_CASES: list[Values] = [
    {"tokens": (1,), "keys": 5, "topk": 4, "heads": 1, "dim": 64},
    {"tokens": (3,), "keys": 9, "topk": 5, "heads": 3, "dim": 24, "value_dim": 16, "scale": 0.01},
    {"tokens": (5,), "keys": 40, "topk": 17, "heads": 8, "dim": 40, "value_dim": 32, "deterministic": True},
    {"tokens": (4,), "keys": 70, "topk": 64, "heads": 16, "dim": 64, "counts": (64, 0, 33, 1)},
    {"tokens": (0,), "keys": 8, "topk": 4, "heads": 2, "dim": 16},
    {"tokens": (3,), "keys": 20, "topk": 64, "heads": 32, "dim": 48, "value_dim": 32, "sliced": True},
    {"tokens": (2,), "keys": 33, "topk": 7, "heads": 128, "dim": 32, "counts": (0, 0)},
    {"tokens": (2,), "keys": 80, "topk": 70, "heads": 5, "dim": 576, "value_dim": 512, "counts": (70, 20)},
    {"tokens": (3,), "keys": 0, "topk": 2, "heads": 2, "dim": 16, "counts": (0, 0, 0)},
    {"tokens": (11,), "keys": 13, "topk": 7, "heads": 4, "dim": 32, "value_dim": 16, "causal": True},
]
DEEPSEEK: Values = {"heads": 128, "dim": 576, "value_dim": 512, "topk": 2048}
_BENCH: list[Values] = [
    {"tokens": (4096,), "keys": 8192, **DEEPSEEK},
    {"tokens": (4096,), "keys": 32768, **DEEPSEEK},
    {"tokens": (4096,), "keys": 32768, "locality": 0.9, **DEEPSEEK},
]


def select(
    count: int,
    keys: int,
    topk: int,
    counts: tuple[int, ...] = (),
    causal: bool = False,
    locality: float = 0.0,
    *,
    device: str,
) -> Tensor:
    """Draw a random selection: [count, topk] int32, keys in ascending order, -1 after the last.

    `counts`: how many keys each token selects, by default as many as possible; `causal`: token t sees the first
    keys - count + t + 1 keys; `locality`: the part of the ranking that neighbouring tokens share.
    """
    if torch.device(device).type == "meta":
        return torch.empty(count, topk, dtype=torch.int32, device=device)
    num_selected = min(topk, keys)
    indices = torch.full((count, topk), -1, dtype=torch.int32, device=device)
    common = torch.rand(keys, device=device)
    for start in range(0, count, 256):
        part = slice(start, min(start + 256, count))
        tokens = torch.arange(part.start, part.stop, device=device)[:, None]
        ranks = locality * common + (1 - locality) * torch.rand(len(tokens), keys, device=device)
        if causal:
            ranks = ranks.masked_fill(torch.arange(keys, device=device) > keys - count + tokens, -1.0)
        best = ranks.topk(num_selected, -1)
        limits = torch.tensor(counts, device=device)[part, None] if counts else num_selected
        is_selected = (best.values >= 0) & (torch.arange(num_selected, device=device) < limits)
        ascending = best.indices.masked_fill(~is_selected, keys).sort(-1).values
        indices[part, :num_selected] = ascending.masked_fill(ascending == keys, -1).int()
    return indices


def _make(
    draw: Draw,
    tokens: tuple[int],
    keys: int,
    dim: int,
    topk: int,
    counts: tuple[int, ...] = (),
    causal: bool = False,
    locality: float = 0.0,
) -> Values:
    indices = select(*tokens, keys, topk, counts, causal, locality, device=draw.device)
    return {"q": draw.normal, "indices": indices, "scale": MLA_SCALE if dim == 576 else dim**-0.5}


def _make_backward(draw: Draw, dlse: bool = False, **case: Any) -> Values:
    args = sparse_attention.draw(draw, **case)
    out, lse = sparse_attention(**args)
    return {**args, "out": out, "lse": lse}


_WORDS = {"keys": "S", "heads": "HQ", "dim": "D"}
sparse_attention.inputs(cases=_CASES, bench=_BENCH, words=_WORDS)(_make)
_ONE_TOKEN = {**_CASES[0], "heads": 8}  # of one head, a gradient has too few roundings to compare
sparse_attention_backward.inputs(
    cases=[_ONE_TOKEN, *_CASES[1:], {**_CASES[1], "dlse": True}],
    bench=[*_BENCH, {**_BENCH[0], "deterministic": True}, {**_BENCH[1], "deterministic": True}],
)(_make_backward)


_MASKED: list[Values] = [
    # Two keys would be too few: their score gradients are one number and its negative, whose error ratio means little.
    {"tokens": (1,), "keys": 9, "topk": 8, "heads": 4, "dim": 64},
    {"tokens": (3,), "keys": 9, "topk": 5, "heads": 3, "dim": 24, "value_dim": 8, "scale": 0.01},
    {"tokens": (5,), "keys": 40, "topk": 17, "heads": 4, "kv_heads": 2, "dim": 40, "value_dim": 32},
    {"tokens": (4,), "keys": 70, "topk": 64, "heads": 2, "dim": 64, "counts": (64, 0, 33, 1)},
    {"tokens": (0,), "keys": 8, "topk": 4, "heads": 2, "dim": 16},
    {"tokens": (3,), "keys": 20, "topk": 64, "heads": 2, "dim": 48, "value_dim": 32, "sliced": True},
    {"tokens": (2,), "keys": 33, "topk": 7, "heads": 2, "dim": 32, "counts": (0, 0)},
    {"tokens": (2,), "keys": 0, "topk": 7, "heads": 2, "dim": 32, "counts": (0, 0)},
    {"tokens": (37,), "keys": 70, "topk": 50, "heads": 1, "dim": 192, "value_dim": 128, "causal": True},
    {"tokens": (9,), "keys": 41, "topk": 41, "heads": 4, "kv_heads": 2, "dim": 32, "value_dim": 16, "dense": True},
    {"tokens": (5,), "keys": 3, "topk": 3, "heads": 2, "dim": 16, "dense": True},
]
_HEADS: Values = {"heads": 128, "dim": 192, "value_dim": 128, "topk": 2048, "causal": True}
_MASKED_BENCH: list[Values] = [
    {"tokens": (4096,), "keys": 4096, **_HEADS},
    {"tokens": (8192,), "keys": 8192, **_HEADS},
    {"tokens": (4096,), "keys": 4096, "topk": 4096, "heads": 16, "kv_heads": 2, "dim": 256, "dense": True},  # Qwen3.5
]


def _make_masked(
    draw: Draw,
    tokens: tuple[int],
    keys: int,
    heads: int,
    dim: int,
    kv_heads: int = 0,
    value_dim: int = 0,
    dense: bool = False,
    **selection: Any,
) -> Values:
    """Draw the arguments; `dense` passes no bit mask, which means causal attention."""
    indices = select(*tokens, keys, **selection, device=draw.device)
    bits = indices.new_empty(*tokens, -(-keys // 32)) if indices.is_meta else selection_mask(indices, keys)
    sizes = {"HK": kv_heads or heads, "G": heads // (kv_heads or heads), "DV": value_dim or dim}
    return {**sizes, "q": draw.normal, "bits": None if dense else bits, "scale": dim**-0.5}


def _make_masked_backward(draw: Draw, dlse: bool = False, **case: Any) -> Values:
    args = masked_attention.draw(draw, **case)
    out, lse = masked_attention(**args)
    return {**args, "out": out, "lse": lse}


_KEYS = {"keys": "S", "dim": "D"}
masked_attention.inputs(cases=_MASKED, bench=_MASKED_BENCH, words=_KEYS)(_make_masked)
masked_attention_backward.inputs(
    cases=[{**_MASKED[0], "heads": 16}, *_MASKED[1:], {**_MASKED[1], "dlse": True}], bench=_MASKED_BENCH
)(_make_masked_backward)


@selection_mask.inputs(
    cases=[
        {"tokens": (1,), "keys": 1, "topk": 1, "scale": 0.01},
        {"tokens": (3,), "keys": 33, "topk": 5},
        {"tokens": (5,), "keys": 100, "topk": 100, "counts": (100, 0, 1, 64, 99)},
        {"tokens": (0,), "keys": 8, "topk": 4},
        {"tokens": (4,), "keys": 64, "topk": 70, "sliced": True},
    ],
    bench=[{"tokens": (4096,), "keys": 4096, "topk": 2048}],
    words={"keys": "num_keys"},
)
def _(draw: Draw, tokens: tuple[int], keys: int, topk: int, counts: tuple[int, ...] = ()) -> Values:
    """Draw a selection; the operator has no floating point tensors, so `scale` changes nothing."""
    indices = select(*tokens, keys, topk, counts, device=draw.device)
    return {"indices": torch.stack((indices, indices), -1)[..., 0] if draw.sliced else indices}
