"""Bidirectional attention within packed segments, such as the patches of one picture in a vision tower."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from . import bidirectional_torch_npu
from .packed import Starts, check_starts, head_reason, read, sequences, special_inputs
from .segment_gradients import plain_backward

ROWS = 512  # queries whose scores are in memory at once


def _flops(values: Values) -> int:
    """Count two operations of each product: of two products in the forward, and of five in the backward."""
    count = len(values["q"])
    parts = sequences("packed_attention", read(values["starts"], count), count)
    pairs = sum((part.stop - part.start) ** 2 for part in parts)
    products = 5 if "dout" in values else 2
    return 2 * products * pairs * values["q"].shape[1] * values["q"].shape[2]


@operator(check=partial(check_starts, "packed_attention"), flops=_flops)
def packed_attention(
    q: Annotated[Tensor, "[T, H, D] float"],
    k: Annotated[Tensor, "[T, H, D] q"],
    v: Annotated[Tensor, "[T, H, D] q"],
    starts: Starts,
    *,
    scale: Annotated[float, "> 0"],
) -> Annotated[Tensor, "[T, H, D] q"]:
    """Attention within packed segments: a token attends to every token of its segment.

    Segment b is tokens starts[b] to starts[b + 1] (exclusive); scale multiplies the scores; returns out contiguous.
    Tokens past the last start are zero. Scores, softmax and sums are in fp32, rounded once. The bits of a segment
    depend on that segment alone, not on what is packed beside it (not even a NaN) nor on where it lies. Ascend does not
    promise this, since it promises no order of sums. Differentiable in q, k and v; the backward computes the attention
    of each segment once more, to sum its weights.

    starts must begin at 0, must not decrease and must not exceed T. The CPU and Ascend raise ValueError otherwise; CUDA
    kernels do not check. On CUDA starts are not read back to the host; elsewhere they are, once, which waits for the
    device.

        out = ops.packed_attention(q, k, v, cu_seqlens, scale=head_size**-0.5)
    """
    outs, end = [], 0
    for part in sequences("packed_attention", read(starts, len(q)), len(q)):
        heads = [widen(x[part]).transpose(0, 1).contiguous() for x in (q, k, v)]
        outs.append(_segment(heads[0], heads[1], heads[2], scale))
        end = part.stop
    # The zeros of padding tokens are computed from q, k and v, so that autograd returns zeros for them, not None.
    padding = widen(q[end:]) + widen(k[end:]) + widen(v[end:])
    out = torch.cat([*outs, padding.masked_fill(torch.ones_like(padding, dtype=torch.bool), 0)])
    return narrow(out, q.dtype).contiguous()


_HEADS_OF = Annotated[Tensor, "[T, H, D] float"]
_LIKE = Annotated[Tensor, "[T, H, D] q"]


@operator(check=partial(check_starts, "packed_attention_backward"), flops=_flops)
def packed_attention_backward(
    dout: Annotated[Tensor, "[T, H, D] q"],
    q: _HEADS_OF,
    k: _LIKE,
    v: _LIKE,
    starts: Starts,
    *,
    scale: Annotated[float, "> 0"],
) -> tuple[_LIKE, _LIKE, _LIKE]:
    """Gradients of `packed_attention` with respect to q, k and v.

    Each segment is computed by itself, its attention once more; sums are in fp32 and rounded once. The gradients of
    tokens past the last start are zero. starts are read back to the host once.
    """
    return plain_backward(dout, q, k, v, read(starts, len(q)), scale)


@packed_attention.gradient(save=("q", "k", "v", "starts"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    inputs = [args[name] for name in ("q", "k", "v", "starts")]
    dq, dk, dv = packed_attention_backward(grads[0], *inputs, scale=args["scale"], backend=args["backend"])
    return {"q": dq, "k": dk, "v": dv}


def _segment(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of one segment, [n, H, D], from q, k and v, [H, n, D] each.

    The sizes of the products depend on this segment alone, and so do its bits.
    """
    rows = [torch.softmax(part @ k.transpose(1, 2), -1) @ v for part in (q * scale).split(ROWS, 1)]
    return torch.cat(rows, 1).transpose(0, 1)


packed_attention.impl("triton", "bidirectional_triton:forward", accepts=head_reason)
packed_attention_backward.impl("triton", "bidirectional_triton:backward", accepts=head_reason)
packed_attention_backward.impl("torch_npu", "bidirectional_torch_npu:backward")
packed_attention.impl("torch_npu", "bidirectional_torch_npu:forward", accepts=bidirectional_torch_npu.reason)


_HEADS = {"heads": 2, "dim": 32}
_CASES: list[Values] = [
    {"lengths": (5,), "heads": 1, "dim": 16},
    {"lengths": (7, 4, 1), **_HEADS},
    {"lengths": (12, 9), "scale": 0.01, **_HEADS},
    {"lengths": (6, 0, 8), "idle": 3, "heads": 3, "dim": 72},
    {"lengths": (0,), **_HEADS},
    {"lengths": (), "idle": 2, **_HEADS},
    {"lengths": (20, 11), "sliced": True, **_HEADS},
    {"lengths": (600,), "heads": 1, "dim": 16},  # more than ROWS
]
_TOWER = {"heads": 16, "dim": 72}
_BENCH: list[Values] = [{"lengths": (4096,) * 4, **_TOWER}, {"lengths": (1200,) * 16, **_TOWER}]
# The towers of Qwen2-VL and of GLM-4V.
_BENCH += [{"lengths": (5184,) * 4, "heads": heads, "dim": dim} for heads, dim in ((16, 80), (12, 128))]


packed_attention.inputs(cases=_CASES, bench=_BENCH, words={"heads": "H", "dim": "D"})(special_inputs)


@packed_attention_backward.inputs(cases=_CASES, bench=_BENCH, words={"heads": "H", "dim": "D"})
def _(draw: Draw, lengths: tuple[int, ...], dim: int, idle: int = 0) -> Values:
    return special_inputs(draw, lengths, dim, idle)
