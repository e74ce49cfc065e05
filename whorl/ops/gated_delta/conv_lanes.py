"""The causal convolution of running sequences, whose last inputs lie in their lanes."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from .conv import WITHOUT, convolve, silu
from .layout import CHUNK, MOST_ROWS
from .sequences import Piece, check_pieces, draw_lanes, pieces


def _check(
    x: Tensor, weight: Tensor, inputs: Tensor, lanes: Tensor, query_starts: Tensor, context_lens: Tensor, **_: object
) -> None:
    check_pieces("causal_conv_lanes", len(x), lanes, query_starts, context_lens)
    if inputs.shape[1] < weight.shape[1]:
        raise ValueError(
            f"causal_conv_lanes: inputs have room for {inputs.shape[1]} tokens, expected {weight.shape[1]} at least, "
            "those that a token looks back on and itself"
        )


@operator(check=_check, mutates=("y", "tail", "inputs"), without=WITHOUT)
def causal_conv_lanes(
    x: Annotated[Tensor, "[T, N] float"],
    weight: Annotated[Tensor, "[N, W] x or fp32"],
    y: Annotated[Tensor, "[T, N] x"],
    tail: Annotated[Tensor, "[M, W - 1, N] x"],
    inputs: Annotated[Tensor, "[M, ring, N] x"],
    lanes: Annotated[Tensor, "[B] int, from 0 to M - 1"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
) -> None:
    """`causal_conv` of the new tokens of running sequences: the bits are equal, however a sequence is cut.

    The new tokens of sequence b are query_starts[b] to query_starts[b + 1] (exclusive), at positions up to
    context_lens[b] - 1. Its last inputs are in lane lanes[b], as `delta_tensors` says: those before the last multiple
    of 64 in `tail`, the last `ring` of the tokens since then in `inputs`, token p at p % 64 % ring. y is written, and
    both are kept up to date. Tokens past the last of query_starts are padding; their y is zero. Returns nothing.

    The next call may go back: up to ring - W + 1 tokens of a call may be computed again with other inputs, as long as
    none of them is the last before a multiple of 64. Values are checked on the CPU only.

        ops.causal_conv_lanes(qkv, weight, y, cache["tail"], cache["inputs"], lanes, query_starts, context_lens)
    """
    taps, reach = widen(weight), weight.shape[1] - 1
    y.zero_()
    for piece in pieces(lanes, query_starts, context_lens):
        before = _before(tail[piece.lane], inputs[piece.lane], piece.start % CHUNK, reach)
        seen = torch.cat((before, x[piece.first : piece.end]))
        y[piece.first : piece.end] = narrow(silu(convolve(widen(seen), taps)), x.dtype)
        _keep(tail[piece.lane], inputs[piece.lane], seen, piece, reach)


def _before(tail: Tensor, inputs: Tensor, row: int, reach: int) -> Tensor:
    """Return the `reach` inputs before row `row` of a chunk, [reach, N]."""
    at = [i % len(inputs) for i in range(max(0, row - reach), row)]
    return torch.cat((tail[min(row, reach) :], inputs[at]))


def _keep(tail: Tensor, inputs: Tensor, seen: Tensor, piece: Piece, reach: int) -> None:
    """Store the last inputs. seen: [reach + n, N], from position piece.start - reach on."""
    stop = piece.start + piece.end - piece.first
    point, origin = stop - stop % CHUNK, piece.start - reach
    if point > piece.start:
        tail.copy_(seen[point - reach - origin : point - origin])
    first = max(piece.start, point, stop - len(inputs))
    at = [p % CHUNK % len(inputs) for p in range(first, stop)]
    inputs[at] = seen[first - origin :]


def _triton_reason(y: Tensor, tail: Tensor, inputs: Tensor, **_: object) -> str | None:
    for name, x in {"tail": tail, "inputs": inputs}.items():
        if len(x) and not x[0].is_contiguous():
            return f"a lane's {name} must be contiguous, got strides {list(x.stride())}"
    return None if y.stride(-1) == 1 else f"y must have unit stride along channels, got strides {list(y.stride())}"


causal_conv_lanes.impl("triton", "conv_triton:lanes", accepts=_triton_reason)


_CASES: list[Values] = [
    {"queries": (1,), "contexts": (1,), "N": 8},
    {"queries": (3, 1, 2), "contexts": (5, 64, 130), "N": 24},
    {"queries": (16, 5), "contexts": (30, 68), "N": 40, "W": 3, "scale": 0.01},
    {"queries": (70, 0, 40), "contexts": (70, 9, 168), "idle": 3, "N": 17},
    {"queries": (0,), "contexts": (4,), "N": 16},
    {"queries": (1, 4), "contexts": (63, 64), "N": 32, "sliced": True},
    {"queries": (128,), "contexts": (192,), "N": 16, "W": 2},
]
_BENCH: list[Values] = [
    {"queries": (8192,), "contexts": (8192,), "N": 8192},
    {"queries": (1,), "contexts": (4100,), "N": 8192},
    {"queries": (1,) * 64, "contexts": (4100,) * 64, "N": 8192},
]


@causal_conv_lanes.inputs(cases=_CASES, bench=_BENCH)
def _(draw: Draw, queries: tuple[int, ...], contexts: tuple[int, ...], idle: int = 0, W: int = 4) -> Values:
    lanes = draw_lanes(draw, queries, contexts, idle)
    return {**lanes, "W": W, "ring": MOST_ROWS + W - 1, "y": draw.normal}
