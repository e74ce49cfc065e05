"""What one step computes, as the indices of at most two forward calls. The only place that builds indices.

A step that decodes and fills makes two calls: the one that decodes may be recorded, the other has any size.

Everything here is on the host. A call's arrays lie side by side in one run of bytes, so that one copy takes them to
the device.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .scheduler import Chunk
from .sequence import Sequence as Seq

UNREAD = -1  # a token that only the device knows: the last one sampled in its lane
# Name, type, how many: T rows, B entries, S samples. Eight bytes first, so that all are aligned.
_FIELDS = (
    ("tokens", "i8", "T"),
    ("lanes", "i8", "T"),
    ("positions", "i8", "T"),
    ("slots", "i8", "T"),
    ("table_at", "i8", "T"),
    ("entry_lanes", "i8", "B"),
    ("sample_rows", "i8", "S"),
    ("sample_lanes", "i8", "S"),
    ("seeds", "i8", "S"),
    ("places", "i8", "S"),
    ("blocks", "i4", "T"),
    ("query_starts", "i4", "B+1"),
    ("context_lens", "i4", "B"),
    ("top_k", "i4", "S"),
    ("temperature", "f4", "S"),
    ("top_p", "f4", "S"),
    ("min_p", "f4", "S"),
)
Size = tuple[int, int, int]  # T, B, S
Field = tuple[str, str, int, int]  # name, type, first byte, number of elements


@functools.lru_cache(maxsize=256)
def layout(size: Size) -> tuple[tuple[Field, ...], int]:
    """Where each field lies when a call has this size, and the bytes of all."""
    counts = {"T": size[0], "B": size[1], "B+1": size[1] + 1, "S": size[2]}
    found, at = [], 0
    for name, kind, count in _FIELDS:
        found.append((name, kind, at, counts[count]))
        at += int(kind[1]) * counts[count]
    return tuple(found), at


@dataclass(slots=True, eq=False)
class Sample:
    """A row whose logits give a token: the one behind `num_drafted` of the chunk's draft."""

    chunk: Chunk
    num_drafted: int
    place: int  # of the token among the sequence's outputs


@dataclass(frozen=True, slots=True)
class Score:
    """A row whose logits score the prompt token at `position + 1`; behind the last one, whose hidden state is kept."""

    sequence: Seq
    position: int


class Insert(NamedTuple):
    """Rows from `row` on that get `length` features of a picture, from `offset` on. number: the encoder's."""

    row: int
    number: int
    offset: int
    length: int


class Placed(NamedTuple):
    """Where a chunk's rows begin in a call, and the lane and the blocks that its sequence had then."""

    chunk: Chunk
    row: int
    lane: int
    block_table: list[int]


@dataclass(slots=True, eq=False)
class Call:
    """One forward call. `samples` and `scores` say what becomes of its rows.

    axes: [A, T] positions, where some sequence has pictures and more than one of its tokens runs; else None.
    """

    is_decode: bool
    arrays: Mapping[str, Sequence[float] | np.ndarray]
    num_keys: int  # that the longest sequence sees
    tables: list[tuple[int, list[int]]]  # lanes that are new, and their blocks
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    score_rows: list[int] = field(default_factory=list)
    axes: np.ndarray | None = None
    inserts: list[Insert] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)

    @property
    def size(self) -> Size:
        return len(self.arrays["tokens"]), len(self.arrays["context_lens"]), len(self.arrays["seeds"])

    @property
    def is_dense(self) -> bool:
        """Whether every row is a sample, as in decoding with or without drafts."""
        return len(self.arrays["tokens"]) == len(self.arrays["seeds"])

    def write(self, into: dict[str, np.ndarray], padding: dict[str, int]) -> None:
        """Fill arrays of this size or larger; `padding` goes where there are no rows, entries or samples."""
        for name, values in self.arrays.items():
            to, count = into[name], len(values)
            to[:count] = values
            if count < len(to):
                to[count:] = self.size[0] if name == "query_starts" else padding.get(name, 0)


class Batch:
    """The chunks of a step. Drafts may be added to them until `calls` lays everything out."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)

    def calls(self, block_size: int, table_width: int) -> list[Call]:
        """table_width: blocks of one lane in the device's table."""
        filling = [chunk for chunk in self.chunks if not chunk.is_decode]
        decoding = [chunk for chunk in self.chunks if chunk.is_decode]
        return [_call(chunks, block_size, table_width) for chunks in (filling, decoding) if chunks]


def _call(chunks: Sequence[Chunk], block_size: int, table_width: int) -> Call:
    tokens: list[int] = []
    lanes: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    starts, contexts, entry_lanes = [0], [], []
    samples: list[Sample] = []
    sample_rows: list[int] = []
    scores: list[Score] = []
    score_rows: list[int] = []
    tables = []
    shown: list[tuple[int, Chunk]] = []
    placed = []
    for chunk in chunks:
        seq, first_row, start = chunk.sequence, len(tokens), chunk.start
        end = start + chunk.length + len(chunk.draft)
        tokens += _tokens(chunk)
        positions += range(start, end)
        lanes += [seq.lane] * (end - start)
        blocks += _blocks(seq.block_table, start, end, block_size)
        starts.append(len(tokens))
        contexts.append(end)
        entry_lanes.append(seq.lane)
        placed.append(Placed(chunk, first_row, seq.lane, seq.block_table))
        if seq.placement is not None:
            shown.append((first_row, chunk))
        if chunk.is_new:
            tables.append((seq.lane, seq.block_table))
        if chunk.is_last:
            samples += [Sample(chunk, i, place) for i, place in enumerate(_places(chunk))]
            sample_rows += range(first_row + chunk.length - 1, len(tokens))
        if seq.params.embed and not chunk.is_decode and end == seq.prompt_len:
            scores.append(Score(seq, end - 1))
            score_rows.append(len(tokens) - 1)
        if seq.num_unscored:
            for position in _scored(chunk):
                scores.append(Score(seq, position))
                score_rows.append(first_row + position - start)
    at, block = np.array(positions), np.array(blocks)
    lane = np.array(lanes)
    arrays = {
        "tokens": tokens,
        "lanes": lane,
        "positions": _turned(at, shown) if chunks[0].is_decode else at,
        "slots": block * block_size + at % block_size,
        "table_at": lane * table_width + at // block_size,
        "blocks": block,
        "entry_lanes": entry_lanes,
        "query_starts": starts,
        "context_lens": contexts,
        "sample_rows": sample_rows,
        "sample_lanes": lane[sample_rows],
        **_sampling(samples),
    }
    call = Call(chunks[0].is_decode, arrays, max(contexts), tables, samples, scores, score_rows, placed=placed)
    if shown and not call.is_decode:
        call.axes = _axes(at, shown)
        call.inserts = [insert for row, chunk in shown for insert in _inserts(row, chunk)]
    return call


# ---- sequences with pictures


def _turned(at: np.ndarray, shown: Sequence[tuple[int, Chunk]]) -> np.ndarray:
    """Positions of decoded tokens, by which they are rotated: behind pictures they are not their indices."""
    if not shown:
        return at
    turned = at.copy()
    for row, chunk in shown:
        assert chunk.sequence.placement is not None
        turned[row : row + chunk.length + len(chunk.draft)] += chunk.sequence.placement.delta
    return turned


def _axes(at: np.ndarray, shown: Sequence[tuple[int, Chunk]]) -> np.ndarray:
    """Those of text are the same on all axes."""
    placements = [chunk.sequence.placement for _, chunk in shown]
    axes: np.ndarray | None = None
    for (row, chunk), placement in zip(shown, placements, strict=True):
        assert placement is not None
        if axes is None:
            axes = np.tile(at, (len(placement.axes), 1))
        stop = chunk.start + chunk.length
        axes[:, row : row + chunk.length] = placement.positions(chunk.start, stop)
    assert axes is not None
    return axes


def _inserts(row: int, chunk: Chunk) -> Iterator[Insert]:
    seq, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.length
    assert seq.placement is not None
    for index, placed in enumerate(seq.placement.items):
        if placed.stop <= start or placed.start >= stop:
            continue
        for frame, span in enumerate(placed.spans):
            first, end = max(span.start, start), min(span.stop, stop)
            if first < end:
                offset = frame * len(span) + first - span.start
                yield Insert(row + first - start, seq.features[index], offset, end - first)


def _tokens(chunk: Chunk) -> list[int]:
    known = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
    return (known or [UNREAD]) + chunk.draft


def _blocks(table: list[int], start: int, end: int, block_size: int) -> Sequence[int]:
    """The block of each position."""
    if end - start == 1:
        return (table[start // block_size],)
    return np.array(table)[np.arange(start, end) // block_size].tolist()  # type: ignore[no-any-return]


def _places(chunk: Chunk) -> range:
    """Of the tokens that a chunk samples, among the sequence's outputs."""
    first = chunk.start + chunk.length - chunk.sequence.prompt_len
    return range(first, first + len(chunk.draft) + 1)


def _sampling(samples: Sequence[Sample]) -> dict[str, list[int] | np.ndarray]:
    sequences = [sample.chunk.sequence for sample in samples]
    asked = np.array([seq.filters for seq in sequences]).reshape(-1, 4).T
    return {
        "seeds": [seq.seed for seq in sequences],
        "places": [sample.place for sample in samples],
        **dict(zip(("temperature", "top_k", "top_p", "min_p"), asked, strict=True)),
    }


def _scored(chunk: Chunk) -> range:
    """Positions of the chunk whose logits the request wants and has not got."""
    seq = chunk.sequence
    first = seq.prompt_len - 1 - seq.num_unscored
    return range(max(chunk.start, first), min(chunk.start + chunk.length, seq.prompt_len - 1))
