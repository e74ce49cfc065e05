"""Gated delta layers run in several ways: packed as in training, and over the lanes of running sequences."""

import itertools
from typing import Any

import torch
from torch import Tensor

from whorl import ops
from whorl.ops.gated_delta import CHUNK, delta_tensors

HK, HV, D, DV, WIDTH = 2, 4, 32, 24, 4
CHANNELS = 2 * HK * D + HV * DV
Values = dict[str, Tensor]


def draw(num_tokens: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Values:
    """Arguments of a layer. Keys are correlated, and over 64 tokens a state decays to between 0.3 and 0.99 of it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def unit(x: Tensor) -> Tensor:
        return ops.l2_norm((x + 0.7 * normal(1, 1, D)).to(dtype))

    values = {"q": unit(normal(num_tokens, HK, D)), "k": unit(normal(num_tokens, HK, D))}
    values["v"] = normal(num_tokens, HV, DV).to(dtype)
    rate = torch.linspace(0.01, 1.2, HV) / CHUNK
    values["g"] = -rate * torch.rand(num_tokens, HV, generator=generator) * 2
    values["beta"] = torch.sigmoid(normal(num_tokens, HV))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values |= {name: values[name].to(wide) for name in ("g", "beta")}
    return {name: x.to(device) for name, x in values.items()}


def new_lanes(count: int, dtype: torch.dtype, device: str = "cpu", junk: bool = True) -> Values:
    """Lanes of a layer, the rows of whose open chunks hold what others left behind."""
    kept, rows = delta_tensors(HK, HV, D, DV, WIDTH, dtype)
    wide = {torch.float32: torch.float64} if dtype == torch.float64 else {}
    tensors = {name: torch.zeros(count, *shape, dtype=wide.get(kind, kind)) for name, (shape, kind) in kept.items()}
    for name, (shape, kind) in rows.items():
        tensors[name] = torch.full((count, *shape), 3.0 if junk else 0.0, dtype=wide.get(kind, kind))
    return {name: x.to(device) for name, x in tensors.items()}


RULE = ("state", "rounded", "keys", "deltas", "decays", "errors", "inverses")
CONV = ("tail", "inputs")


def call(name: str, tensors: Values, states: Values, spans: list[tuple[int, int, int]], **options: Any) -> Tensor:
    """Call an operator on lanes with tokens of sequences. spans: lane, first and end (exclusive) position of each;
    every sequence is rows first to end of `tensors`. Returns the new tokens' results, one sequence after the other."""
    device = states["state"].device
    new = {k: torch.cat([x[first:end] for _, first, end in spans]) for k, x in tensors.items() if k != "weight"}
    lengths = torch.tensor([0, *(end - first for _, first, end in spans)])
    tables = {
        "lanes": torch.tensor([lane for lane, _, _ in spans], device=device),
        "query_starts": lengths.cumsum(0).int().to(device),
        "context_lens": torch.tensor([end for _, _, end in spans], dtype=torch.int32, device=device),
    }
    if name == "conv":
        y = torch.full_like(new["x"], 7)
        of_lane = {n: states[n] for n in CONV}
        ops.causal_conv_lanes(new["x"], tensors["weight"], y, **of_lane, **tables, **options)
        return y
    out = torch.full_like(new["v"], 7)
    ops.gated_delta_lanes(**new, out=out, **{n: states[n] for n in RULE}, **tables, scale=D**-0.5, **options)
    return out


def in_cuts(name: str, tensors: Values, cuts: list[int], states: Values, lane: int = 0, **options: Any) -> Tensor:
    """A sequence computed in calls that end at `cuts`."""
    pairs = itertools.pairwise([0, *cuts])
    return torch.cat([call(name, tensors, states, [(lane, first, end)], **options) for first, end in pairs])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, the sign of zero included."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
