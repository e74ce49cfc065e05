"""The gated delta rule over packed sequences."""

from typing import Annotated

import torch
from torch import Tensor

from .._op import narrow, operator, widen
from ..attention.packed import Starts, check_starts, read, sequences
from .arithmetic import OpenChunk, Rows

_KEYS = Annotated[Tensor, "[T, HK>0, D] q"]
_QUERIES = Annotated[Tensor, "[T, HK>0, D] float"]
_VALUES = Annotated[Tensor, "[T, G*HK, DV] q"]
_GATES = Annotated[Tensor, "[T, G*HK] fp32"]
_SCALE = Annotated[float, "> 0"]


@operator(check=lambda q, starts, **_: check_starts("gated_delta", q, starts))
def gated_delta(
    q: _QUERIES, k: _KEYS, v: _VALUES, g: _GATES, beta: _GATES, starts: Starts, *, scale: _SCALE
) -> _VALUES:
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
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    rows = Rows(widen(q), widen(k), widen(v), g, beta)
    for part in sequences("gated_delta", read(starts, len(q)), len(q)):
        empty = rows.v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        chunk = OpenChunk.begin(empty, q.shape[1], q.dtype)
        out[part] = narrow(chunk.append(rows.part(part.start, part.stop), scale), v.dtype)
    return out
