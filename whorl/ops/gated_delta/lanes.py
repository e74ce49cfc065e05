"""The gated delta rule of running sequences, whose states lie in their lanes."""

from typing import Annotated

from torch import Tensor

from .._op import narrow, operator, widen
from .arithmetic import OpenChunk, Rows
from .layout import CHUNK
from .sequences import check_pieces, pieces


def _check(q: Tensor, lanes: Tensor, query_starts: Tensor, context_lens: Tensor, **_: object) -> None:
    check_pieces("gated_delta_lanes", len(q), lanes, query_starts, context_lens)


@operator(check=_check, mutates=("out", "state", "rounded", "keys", "deltas", "decays"))
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
    lanes: Annotated[Tensor, "[B] int, from 0 to M - 1"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
    *,
    scale: Annotated[float, "> 0"],
) -> None:
    """`gated_delta` of the new tokens of running sequences: the bits are equal, however a sequence is cut.

    The new tokens of sequence b are query_starts[b] to query_starts[b + 1] (exclusive), at positions up to
    context_lens[b] - 1; q, k, v, g, beta and scale are as in `gated_delta`. The sequence's state is in lane lanes[b], as
    `delta_tensors` says. out is written, and the lane holds afterwards: in `state` the state at the last multiple of 64
    positions, which is what a snapshot needs; in `keys`, `deltas` and `decays` the rows since then; in `rounded`, if
    there are such rows, the state in q's dtype. Tokens past the last of query_starts are padding; their out is zero.
    Returns nothing.

    Rows may be computed again: a call may begin at any position of the open chunk up to the one after its last row. So
    drafts are rejected by the next call alone, as long as none of them is the last token before a multiple of 64. Where
    a sequence begins at a multiple of 64, only `state` is read. Values of lanes, query_starts and context_lens are
    checked on the CPU only.

        ops.gated_delta_lanes(q, k, v, g, beta, out, *states, lanes, query_starts, context_lens, scale=128**-0.5)
    """
    out.zero_()
    rows = Rows(widen(q), widen(k), widen(v), g, beta)
    for lane, first, end, start in pieces(lanes, query_starts, context_lens):
        stored = [x[lane] for x in (state, rounded, keys, deltas, decays)]
        chunk = _load(*stored, start % CHUNK)
        out[first:end] = narrow(chunk.append(rows.part(first, end), scale), out.dtype)
        _store(chunk, *stored, start, start + end - first)


def _load(
    state: Tensor, narrow_state: Tensor, keys: Tensor, deltas: Tensor, decays: Tensor, length: int
) -> OpenChunk:  # fmt: skip
    """Return the open chunk of a lane with its first `length` rows; what lies after them may be rejected drafts."""
    chunk = OpenChunk.begin(state, len(keys), keys.dtype)
    if length:
        chunk.rounded, chunk.length = widen(narrow_state), length
        for rows, of_lane in ((chunk.keys, keys), (chunk.deltas, deltas), (chunk.decays, decays)):
            rows[:, :length] = of_lane[:, :length]
    return chunk


def _store(
    chunk: OpenChunk,
    state: Tensor,
    narrow_state: Tensor,
    keys: Tensor,
    deltas: Tensor,
    decays: Tensor,
    start: int,
    stop: int,
) -> None:
    """Store what tokens start to stop (exclusive) have changed."""
    point = stop - stop % CHUNK
    if point > start:
        state.copy_(chunk.state)
    if point >= start and chunk.length:
        narrow_state.copy_(chunk.rounded)
    new = slice(max(start, point) - point, chunk.length)
    for rows, of_lane in ((chunk.keys, keys), (chunk.deltas, deltas), (chunk.decays, decays)):
        of_lane[:, new] = narrow(rows[:, new], of_lane.dtype)
