"""The gated delta rule over packed sequences."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from ..attention.packed import Starts, check_starts, head_reason, read, sequences
from .arithmetic import OpenChunk, Rows
from .l2_norm import l2_norm
from .layout import CHUNK

KEYS = Annotated[Tensor, "[T, HK>0, D] q"]
QUERIES = Annotated[Tensor, "[T, HK>0, D] float"]
VALUES = Annotated[Tensor, "[T, G*HK, DV] q"]
GATES = Annotated[Tensor, "[T, G*HK] fp32"]
SCALE = Annotated[float, "> 0"]
WITHOUT = {
    "torch_npu": "npu_chunk_gated_delta_rule keeps the state in bf16 and promises no bits that decoding continues"
}


@operator(check=lambda q, starts, **_: check_starts("gated_delta", q, starts), without=WITHOUT)
def gated_delta(q: QUERIES, k: KEYS, v: VALUES, g: GATES, beta: GATES, starts: Starts, *, scale: SCALE) -> VALUES:
    """The gated delta rule over packed sequences: returns out, contiguous.

    Sequence b is tokens starts[b] to starts[b + 1] (exclusive). Each of the G*HK value heads has a state S [D, DV],
    zero at the start of a sequence; value head i reads key head i // G. A token does

        S = e^g S;  S = S + k (beta (v - k S))^T;  out = scale q S

    q and k are normalised already (`l2_norm`), g is 0 at most and beta from 0 to 1 (`delta_gates`). Tokens past the
    last start are padding and zero. It is computed in chunks of 64 tokens from the start of the sequence, with operands
    in q's dtype and sums, gates and state in fp32; out is rounded once. `arithmetic.py` has the roundings. The bits are
    those of `gated_delta_lanes` for the same tokens, however they are cut there. Differentiable in all but starts.

        out = ops.gated_delta(q, k, v, g, beta, starts, scale=128**-0.5)
    """
    rows, parts, end = Rows(widen(q), widen(k), widen(v), g, beta), [], 0
    for part in sequences("gated_delta", read(starts, len(q)), len(q)):
        empty = rows.v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        chunk = OpenChunk.begin(empty, q.shape[1], q.dtype)
        parts.append(chunk.append(rows.part(part.start, part.stop), scale))
        end = part.stop
    # Zeros for padding tokens, but computed, so that autograd returns zeros for them and not None.
    padding = rows.v[end:] * (g + beta)[end:, :, None] * (rows.q + rows.k)[end:].sum((1, 2), keepdim=True)
    padding = padding.masked_fill(torch.ones_like(padding, dtype=torch.bool), 0)
    return narrow(torch.cat([*parts, padding]), v.dtype).contiguous()


gated_delta.impl("triton", "rule_triton:forward", accepts=head_reason)


_SMALL = {"HK": 1, "G": 1, "D": 16, "DV": 16}
CASES: list[Values] = [
    {"lengths": (7,), **_SMALL},
    {"lengths": (7, 5, 1), "HK": 2, "G": 2, "D": 32, "DV": 16},
    {"lengths": (12, 9), "HK": 1, "G": 3, "D": 16, "DV": 24, "scale": 0.01},
    {"lengths": (6, 0, 8), "idle": 3, "HK": 2, "G": 1, "D": 24, "DV": 40},
    {"lengths": (0,), **_SMALL},
    {"lengths": (), "idle": 2, **_SMALL},
    {"lengths": (20, 11), "sliced": True, "HK": 1, "G": 2, "D": 32, "DV": 32},
    {"lengths": (140, 64), "HK": 1, "G": 2, "D": 16, "DV": 16},
]
_QWEN = {"HK": 16, "G": 2, "D": 128, "DV": 128}
BENCH: list[Values] = [{"lengths": (8192,), **_QWEN}, {"lengths": (4000, 1192, 3000), **_QWEN}]


def draw_rule(draw: Draw, num_tokens: int, heads: int, value_heads: int, dim: int) -> Values:
    """Draw q, k, g and beta. Keys are correlated; over 64 tokens a state decays to between 0.3 and 0.99 of itself."""
    base = torch.randn(1, heads, dim, **draw.kind)
    q, k = (l2_norm(0.5 * draw.normal(num_tokens, heads, dim) + base) for _ in range(2))
    kind: Values = {"dtype": draw.wide, "device": draw.device}
    rate = torch.linspace(0.01, 1.2, value_heads, **kind) / CHUNK
    g = -2 * rate * torch.rand(num_tokens, value_heads, **kind)
    beta = torch.rand(num_tokens, value_heads, **kind)
    if draw.gap:
        q, k, g, beta = (torch.cat((x, x[..., : draw.gap]), -1)[..., : x.shape[-1]] for x in (q, k, g, beta))
    return {"q": q, "k": k, "g": g, "beta": beta}


def special_inputs(
    draw: Draw, lengths: tuple[int, ...], HK: int, G: int, D: int, DV: int, idle: int = 0
) -> Values:  # fmt: skip
    """Return what is special of a case of packed sequences; idle: tokens past the last one."""
    count = sum(lengths) + idle
    tensors = draw_rule(draw, count, HK, G * HK, D)
    return {**tensors, "starts": draw.offsets(lengths), "T": count, "DV": DV, "scale": D**-0.5}


gated_delta.inputs(cases=CASES, bench=BENCH)(special_inputs)
