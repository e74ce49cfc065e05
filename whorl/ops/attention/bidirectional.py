"""Bidirectional attention within packed segments, such as the patches of one picture in a vision tower."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from .._op import Values, narrow, operator, widen
from . import bidirectional_torch_npu
from .packed import Starts, check_starts, head_reason, read, sequences, special_inputs

ROWS = 512  # queries whose scores are in memory at once


def _flops(values: Values) -> int:
    """Count q k^T and p v, with two operations each per query, key, head and channel."""
    count = len(values["q"])
    parts = sequences("packed_attention", read(values["starts"], count), count)
    pairs = sum((part.stop - part.start) ** 2 for part in parts)
    return 4 * pairs * values["q"].shape[1] * values["q"].shape[2]


@operator(check=partial(check_starts, "packed_attention"), flops=_flops, forward_only=True)
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
    promise this, since it promises no order of sums. No gradient.

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
    padding = q.new_zeros(q[end:].shape, dtype=outs[0].dtype if outs else q.dtype)
    out = torch.cat([*outs, padding])
    return narrow(out, q.dtype).contiguous()


def _segment(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of one segment, [n, H, D], from q, k and v, [H, n, D] each.

    The sizes of the products depend on this segment alone, and so do its bits.
    """
    rows = [torch.softmax(part @ k.transpose(1, 2), -1) @ v for part in (q * scale).split(ROWS, 1)]
    return torch.cat(rows, 1).transpose(0, 1)


packed_attention.impl("triton", "bidirectional_triton:forward", accepts=head_reason)
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


packed_attention.inputs(cases=_CASES, bench=_BENCH, words={"heads": "H", "dim": "D"})(special_inputs)
