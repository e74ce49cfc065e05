"""The gated delta rule of running sequences, whose states lie in their lanes."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

from torch import Tensor

from .._op import narrow, operator, widen
from .arithmetic import OpenChunk, Rows
from .layout import BLOCK, CHUNK
from .sequences import check_pieces, pieces


def _check(q: Tensor, lanes: Tensor, query_starts: Tensor, context_lens: Tensor, **_: object) -> None:
    check_pieces("gated_delta_lanes", len(q), lanes, query_starts, context_lens)


@operator(check=_check, mutates=("out", "state", "rounded", "keys", "deltas", "decays", "errors", "inverses"))
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
    such a multiple. Where a sequence begins at a multiple of 64, only `state` is read. Values of lanes, query_starts
    and context_lens are checked on the CPU only.

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
