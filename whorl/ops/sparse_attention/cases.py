"""Test and benchmark cases of sparse and masked attention, and the random selections they use."""

from typing import Any

import torch
from torch import Tensor

from .._draw import Draw, Sizes
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
    counts: Sizes = (),
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


def _attention(
    draw: Draw, tokens: Sizes, keys: int, heads: int, dim: int, value_dim: int = 0, **selection: Any
) -> Values:
    return {
        "q": draw.normal(tokens[0], heads, dim),
        "kv": draw.scaled(keys, 1, dim),
        "indices": select(tokens[0], keys, **selection, device=draw.device),
        "scale": MLA_SCALE if dim == 576 else dim**-0.5,
        "value_dim": value_dim,
    }


def _make(draw: Draw, deterministic: bool = False, **case: Any) -> Values:
    return _attention(draw, **case) | {"deterministic": deterministic}


def _gradients(out: Tensor, lse: Tensor, with_dlse: bool) -> Values:
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_dlse else None
    return {"dout": dout, "out": out, "lse": lse, "dlse": dlse}


def _make_backward(draw: Draw, with_dlse: bool = False, **case: Any) -> Values:
    args = _make(draw, **case)
    q, value_dim = args["q"], args.pop("value_dim")
    if q.is_meta:
        out, lse = q.new_empty(*q.shape[:2], value_dim), q.new_empty(q.shape[:2], dtype=torch.float32)
    else:
        with torch.no_grad():
            out, lse = sparse_attention(q, args["kv"], args["indices"], args["scale"], value_dim=value_dim)
    return _gradients(out, lse, with_dlse) | args


sparse_attention.inputs(cases=_CASES, bench=_BENCH)(_make)
sparse_attention_backward.inputs(
    cases=[*_CASES, {**_CASES[1], "with_dlse": True}],
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
]


def _masked(
    draw: Draw, tokens: Sizes, keys: int, heads: int, dim: int, kv_heads: int = 0, value_dim: int = 0, **selection: Any
) -> Values:
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    indices = select(tokens[0], keys, **selection, device=draw.device)
    bits = selection_mask(indices, keys) if not indices.is_meta else indices.new_empty(tokens[0], -(-keys // 32))
    return {
        "q": draw.normal(tokens[0], heads, dim),
        "k": draw.scaled(keys, kv_heads, dim),
        "v": draw.scaled(keys, kv_heads, value_dim),
        "bits": bits,
        "scale": dim**-0.5,
    }


def _make_masked(draw: Draw, dense: bool = False, **case: Any) -> Values:
    """Draw the arguments; `dense` passes no bit mask, which means causal attention."""
    return _masked(draw, **case) | ({"bits": None} if dense else {})


def _make_masked_backward(draw: Draw, with_dlse: bool = False, **case: Any) -> Values:
    args = _make_masked(draw, **case)
    q, v = args["q"], args["v"]
    if q.is_meta:
        out, lse = v.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)
    else:
        out, lse = masked_attention(**args)
    return _gradients(out, lse, with_dlse) | args


masked_attention.inputs(cases=_MASKED, bench=_MASKED_BENCH)(_make_masked)
masked_attention_backward.inputs(cases=[*_MASKED, {**_MASKED[1], "with_dlse": True}], bench=_MASKED_BENCH)(
    _make_masked_backward
)


def _make_selection(draw: Draw, tokens: Sizes, keys: int, topk: int, counts: Sizes = ()) -> Values:
    """Draw the arguments; the operator has no floating point tensors, so `scale` changes nothing."""
    indices = select(tokens[0], keys, topk, counts, device=draw.device)
    return {"indices": torch.stack((indices, indices), -1)[..., 0] if draw.sliced else indices, "num_keys": keys}


selection_mask.inputs(
    cases=[
        {"tokens": (1,), "keys": 1, "topk": 1, "scale": 0.01},
        {"tokens": (3,), "keys": 33, "topk": 5},
        {"tokens": (5,), "keys": 100, "topk": 100, "counts": (100, 0, 1, 64, 99)},
        {"tokens": (0,), "keys": 8, "topk": 4},
        {"tokens": (4,), "keys": 64, "topk": 70, "sliced": True},
    ],
    bench=[{"tokens": (4096,), "keys": 4096, "topk": 2048}],
)(_make_selection)
