"""The gated delta rule of running sequences, whose states lie in their lanes."""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from .._tracing import is_readable
from ..attention.packed import head_reason
from .arithmetic import OpenChunk, Rows
from .layout import BLOCK, CHUNK, delta_tensors
from .rule import WITHOUT, draw_rule
from .sequences import check_pieces, draw_lanes, pieces

_LENGTHS = ("lanes", "query_starts", "context_lens")


def _check(q: Tensor, lanes: Tensor, query_starts: Tensor, context_lens: Tensor, **_: object) -> None:
    check_pieces("gated_delta_lanes", len(q), lanes, query_starts, context_lens)
    if all(map(is_readable, (lanes, query_starts, context_lens))):
        for piece in pieces(lanes, query_starts, context_lens):
            row, count = piece.start % CHUNK, piece.end - piece.first
            if row and row + count > CHUNK:
                raise ValueError(
                    f"gated_delta_lanes: the sequence in lane {piece.lane} has {count} new tokens from position "
                    f"{piece.start} on, expected {CHUNK - row} at most: a call that does not begin at a multiple of "
                    f"{CHUNK} ends at the next one"
                )


NAMES = ("state", "rounded", "keys", "deltas", "decays", "errors", "inverses")


@operator(check=_check, mutates=("out", *NAMES), without=WITHOUT)
def gated_delta_lanes(
    q: Annotated[Tensor, "[T, HK>0, D] float"],
    k: Annotated[Tensor, "[T, HK>0, D] q"],
    v: Annotated[Tensor, "[T, G*HK, DV] q"],
    g: Annotated[Tensor, "[T, G*HK] fp32"],
    beta: Annotated[Tensor, "[T, G*HK] fp32"],
    out: Annotated[Tensor, "[T, G*HK, DV] q"],
    state: Annotated[Tensor, "[M, G*HK, D, DV] fp32"],
    rounded: Annotated[Tensor, "[M, G*HK, D, DV] q"],
    keys: Annotated[Tensor, "[M, HK>0, 64, D] q"],
    deltas: Annotated[Tensor, "[M, G*HK, 64, DV] q"],
    decays: Annotated[Tensor, "[M, G*HK, 64] fp32"],
    errors: Annotated[Tensor, "[M, G*HK, 32, DV] q"],
    inverses: Annotated[Tensor, "[M, G*HK, 32, 16] fp32"],
    lanes: Annotated[Tensor, "[B] int, from 0 to M - 1"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
    *,
    scale: Annotated[float, "> 0"],
    most: Annotated[int, ">= 0"] = 0,
) -> None:
    """`gated_delta` of the new tokens of running sequences: the bits are equal, however a sequence is cut.

    The new tokens of sequence b are query_starts[b] to query_starts[b + 1] (exclusive), at positions up to
    context_lens[b] - 1; q, k, v, g, beta and scale are as in `gated_delta`. The sequence's state is in lane lanes[b],
    as `delta_tensors` says. out is written, and the lane holds afterwards: in `state` the state at the last multiple of
    64 positions, which is what a snapshot needs; in the others, if there are tokens since then, their rows, and in
    `rounded` the state in q's dtype. Tokens past the last of query_starts are padding; their out is zero. Returns
    nothing.

    Rows may be computed again: of a call of up to 16 tokens, the next call may begin at any that is not the first after
    a multiple of 64. So drafts are rejected by the next call alone, as long as none of them is the last token before
    such a multiple. Where a sequence begins at a multiple of 64, only `state` is read. A call that begins elsewhere
    does not go past the next multiple. Values of lanes, query_starts and context_lens are checked on the CPU only.

    most: the most new tokens of a sequence, where the caller knows them; 0: not known. It changes no bits, only the
    kernel: with up to 64 CUDA computes rows alone, and prompts by chunks otherwise.

        states = {name: cache[name] for name in ("state", "rounded", "keys", "deltas", "decays", "errors", "inverses")}
        ops.gated_delta_lanes(
            q, k, v, g, beta, out, **states, lanes=lanes, query_starts=starts, context_lens=lengths, scale=128**-0.5
        )
    """
    out.zero_()
    rows = Rows(widen(q), widen(k), widen(v), g, beta)
    for piece in pieces(lanes, query_starts, context_lens):
        stored = Stored(*(x[piece.lane] for x in (state, rounded, keys, deltas, decays, errors, inverses)))
        chunk = _load(stored, piece.start % CHUNK)
        out[piece.first : piece.end] = narrow(chunk.append(rows.part(piece.first, piece.end), scale), out.dtype)
        _store(chunk, stored, piece.start, piece.start + piece.end - piece.first)


class Stored(NamedTuple):
    """The tensors of one lane."""

    state: Tensor
    rounded: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor
    errors: Tensor
    inverses: Tensor

    def rows(self, chunk: OpenChunk) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of a chunk and of this lane that belong together; the lane may have the last RECENT alone."""
        for name in ("keys", "deltas", "decays", "errors", "inverses"):
            yield getattr(chunk, name), getattr(self, name)


def _load(stored: Stored, length: int) -> OpenChunk:
    """Return the open chunk of a lane with its first `length` rows; what lies after them may be rejected drafts."""
    chunk = OpenChunk.begin(stored.state, len(stored.keys), stored.keys.dtype)
    if length:
        chunk.rounded, chunk.length = widen(stored.rounded), length
        for rows, of_lane in stored.rows(chunk):
            first = length - length % BLOCK if of_lane.shape[1] < CHUNK else 0
            rows[:, first:length] = of_lane[:, _places(first, length, of_lane)]
    return chunk


def _store(chunk: OpenChunk, stored: Stored, start: int, stop: int) -> None:
    """Store what tokens start to stop (exclusive) have changed."""
    point = stop - stop % CHUNK
    if point > start:
        stored.state.copy_(chunk.state)
    if point >= start and chunk.length:
        stored.rounded.copy_(chunk.rounded)
    for rows, of_lane in stored.rows(chunk):
        first = max(start - point, 0, (chunk.length - 1) // BLOCK * BLOCK - (of_lane.shape[1] - BLOCK))
        of_lane[:, _places(first, chunk.length, of_lane)] = narrow(rows[:, first : chunk.length], of_lane.dtype)


def _places(first: int, end: int, of_lane: Tensor) -> list[int]:
    """Return where rows first to end (exclusive) of a chunk are in a tensor of a lane."""
    return [i % of_lane.shape[1] for i in range(first, end)]


def lanes_reason(stored: dict[str, Tensor], out: Tensor, q: Tensor) -> str | None:
    """Return why the Triton kernels do not take these lanes, result and heads."""
    for name, x in stored.items():
        if len(x) and not x[0].is_contiguous():
            return f"a lane's {name} must be contiguous, got strides {list(x.stride())}"
    if out.stride(-1) != 1:
        return f"out must have unit stride along channels, got strides {list(out.stride())}"
    return head_reason(q)


def _triton_reason(q: Tensor, out: Tensor, **arguments: Any) -> str | None:
    return lanes_reason({name: arguments[name] for name in NAMES}, out, q)


gated_delta_lanes.impl("triton", "rows_triton:compute", accepts=_triton_reason)


_SMALL = {"HK": 1, "G": 1, "D": 16, "DV": 16}
_CASES: list[Values] = [
    {"queries": (1,), "contexts": (1,), **_SMALL},
    {"queries": (3, 1, 2), "contexts": (5, 64, 130), "HK": 2, "G": 2, "D": 32, "DV": 16},
    {"queries": (16, 5), "contexts": (30, 64), "HK": 1, "G": 3, "D": 16, "DV": 24, "scale": 0.01},
    {"queries": (70, 0, 30), "contexts": (70, 9, 190), "idle": 3, "HK": 2, "G": 1, "D": 24, "DV": 40},
    {"queries": (0,), "contexts": (4,), **_SMALL},
    {"queries": (1, 4), "contexts": (63, 64), "HK": 1, "G": 2, "D": 32, "DV": 32, "sliced": True},
    {"queries": (128, 50), "contexts": (192, 50), **_SMALL},
    {"queries": (4, 1), "contexts": (34, 49), "most": 4, "HK": 1, "G": 2, "D": 16, "DV": 16},
]
_QWEN = {"HK": 16, "G": 2, "D": 128, "DV": 128}
_BENCH: list[Values] = [
    {"queries": (8192,), "contexts": (8192,), **_QWEN},
    {"queries": (1,), "contexts": (4130,), "most": 1, **_QWEN},
    {"queries": (1,) * 64, "contexts": (4130,) * 64, "most": 1, **_QWEN},
]


@gated_delta_lanes.inputs(cases=_CASES, bench=_BENCH)
def _(
    draw: Draw,
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    HK: int,
    G: int,
    D: int,
    DV: int,
    idle: int = 0,
) -> Values:
    stored = draw_stored(draw, queries, contexts, HK, G, D, DV, idle)
    return {**stored, **draw_rule(draw, stored["T"], HK, G * HK, D), "out": draw.normal}


def draw_stored(
    draw: Draw, queries: tuple[int, ...], contexts: tuple[int, ...], HK: int, G: int, D: int, DV: int, idle: int
) -> Values:
    """Return sizes and what lanes hold before a call; rows of open chunks are those that `gated_delta_lanes` leaves:
    others may have no inverse."""
    lanes = draw_lanes(draw, queries, contexts, idle)
    sizes = {"HK": HK, "G": G, "D": D, "DV": DV, "scale": D**-0.5}
    if draw.device == "meta":
        return {**lanes, **sizes}
    stored = Draw(draw.dtype, draw.device)
    kept, rows = delta_tensors(HK, G * HK, D, DV, 1, draw.dtype)
    specs = {name: spec for name, spec in (kept | rows).items() if name in NAMES}
    kind = {torch.float32: draw.wide}
    of_lanes = {
        name: torch.zeros(lanes["M"], *shape, dtype=kind.get(dtype, dtype), device=draw.device)
        for name, (shape, dtype) in specs.items()
    }
    of_lanes["state"] += 0.3 * torch.randn(of_lanes["state"].shape, **stored.kind)
    before = [(context - query) % CHUNK for query, context in zip(queries, contexts, strict=True)]
    old = draw_lanes(stored, before, before, 0)
    earlier = draw_rule(stored, sum(before), HK, G * HK, D)
    v = stored.scaled(sum(before), G * HK, DV)
    gated_delta_lanes.reference(
        **earlier, v=v, out=torch.empty_like(v), **of_lanes, **{n: old[n] for n in _LENGTHS}, scale=D**-0.5
    )
    return {**lanes, **sizes, **of_lanes}
