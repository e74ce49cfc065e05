"""A batch turns the chunks of a step into the indices of at most two forward calls. No other module builds indices.

A step with prompts and decoding sequences makes two calls: the decode call may be a recorded graph, the other call may
have any size.

Everything here is on the host. A call's arrays lie one after the other in one buffer, so that one copy takes them to
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
# Name, type and count of each array: T tokens, B sequences ("entries"), S samples. Eight-byte types come first, so that
# all arrays are aligned. lanes: of each token; table_at, blocks: the entry of the block table that a token writes, and
# its value; entry_lanes: of each sequence; places: index of the sampled token among the outputs of its sequence.
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
def field_offsets(size: Size) -> tuple[tuple[Field, ...], int]:
    """Return where each array of a call of this size lies in the buffer, and the bytes of all arrays."""
    counts = {"T": size[0], "B": size[1], "B+1": size[1] + 1, "S": size[2]}
    fields, num_bytes = [], 0
    for name, kind, count in _FIELDS:
        fields.append((name, kind, num_bytes, counts[count]))
        num_bytes += int(kind[1]) * counts[count]
    return tuple(fields), num_bytes


@dataclass(slots=True, eq=False)
class Sample:
    """A position whose logits are sampled: the token after the first `num_drafted` tokens of the chunk's draft."""

    chunk: Chunk
    num_drafted: int
    place: int  # index of the sampled token among the sequence's outputs


@dataclass(frozen=True, slots=True)
class Score:
    """A prompt position whose hidden state is used: its logits score the token at `position + 1`; at the last position
    it is the embedding of the prompt."""

    sequence: Seq
    position: int


class Insert(NamedTuple):
    """`length` features of an image, from `offset` on, that replace the embeddings of tokens from `row` on in a call.

    number: the encoder's number of the image.
    """

    row: int
    number: int
    offset: int
    length: int


class Placed(NamedTuple):
    """A chunk in a call: where its tokens begin, and the lane and block table that its sequence had at that time."""

    chunk: Chunk
    row: int
    lane: int
    block_table: list[int]


@dataclass(slots=True, eq=False)
class Call:
    """One forward call. `samples` and `scores` list the positions whose outputs are used.

    axes: [A, T] positions, if the call has prompts and some sequence has images; else None.
    """

    is_decode: bool
    arrays: Mapping[str, Sequence[float] | np.ndarray]
    num_keys: int  # tokens that the longest sequence attends to
    tables: list[tuple[int, list[int]]]  # new lanes and their block tables
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
        """Whether every token is sampled from, as in decoding with or without drafts."""
        return len(self.arrays["tokens"]) == len(self.arrays["seeds"])

    def write(self, arrays: dict[str, np.ndarray], padding: dict[str, int]) -> None:
        """Copy the call's arrays to arrays of this size or larger; `padding` has the values of further elements."""
        for name, values in self.arrays.items():
            array, count = arrays[name], len(values)
            array[:count] = values
            if count < len(array):
                array[count:] = self.size[0] if name == "query_starts" else padding.get(name, 0)


class Batch:
    """The chunks of a step. Drafts may be added to them until `calls` builds the indices."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)

    def calls(self, block_size: int, table_width: int) -> list[Call]:
        """Return the calls of the step, prompts first. table_width: blocks of one lane in the device's block tables."""
        prompts = [chunk for chunk in self.chunks if not chunk.is_decode]
        decoding = [chunk for chunk in self.chunks if chunk.is_decode]
        return [_build_call(chunks, block_size, table_width) for chunks in (prompts, decoding) if chunks]


def _build_call(chunks: Sequence[Chunk], block_size: int, table_width: int) -> Call:
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
    with_images: list[tuple[int, Chunk]] = []
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
            with_images.append((first_row, chunk))
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
    index, block = np.array(positions), np.array(blocks)
    lane = np.array(lanes)
    arrays = {
        "tokens": tokens,
        "lanes": lane,
        "positions": _rotary_positions(index, with_images) if chunks[0].is_decode else index,
        "slots": block * block_size + index % block_size,
        "table_at": lane * table_width + index // block_size,
        "blocks": block,
        "entry_lanes": entry_lanes,
        "query_starts": starts,
        "context_lens": contexts,
        "sample_rows": sample_rows,
        "sample_lanes": lane[sample_rows],
        **_sampling(samples),
    }
    call = Call(chunks[0].is_decode, arrays, max(contexts), tables, samples, scores, score_rows, placed=placed)
    if with_images and not call.is_decode:
        call.axes = _axes(index, with_images)
        call.inserts = [insert for row, chunk in with_images for insert in _inserts(row, chunk)]
    return call


# ---- sequences with images


def _rotary_positions(index: np.ndarray, with_images: Sequence[tuple[int, Chunk]]) -> np.ndarray:
    """Return the positions that rotate decoded tokens: after images they differ from the index in the sequence."""
    if not with_images:
        return index
    positions = index.copy()
    for row, chunk in with_images:
        assert chunk.sequence.placement is not None
        positions[row : row + chunk.length + len(chunk.draft)] += chunk.sequence.placement.delta
    return positions


def _axes(index: np.ndarray, with_images: Sequence[tuple[int, Chunk]]) -> np.ndarray:
    """Return the positions [A, T] of a call with images; those of text are the same on all axes."""
    placements = [chunk.sequence.placement for _, chunk in with_images]
    axes: np.ndarray | None = None
    for (row, chunk), placement in zip(with_images, placements, strict=True):
        assert placement is not None
        if axes is None:
            axes = np.tile(index, (len(placement.axes), 1))
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
    """Return the block of each position."""
    if end - start == 1:
        return (table[start // block_size],)
    return np.array(table)[np.arange(start, end) // block_size].tolist()  # type: ignore[no-any-return]


def _places(chunk: Chunk) -> range:
    """Return the indices, among the sequence's outputs, of the tokens that a chunk samples."""
    first = chunk.start + chunk.length - chunk.sequence.prompt_len
    return range(first, first + len(chunk.draft) + 1)


def _sampling(samples: Sequence[Sample]) -> dict[str, list[int] | np.ndarray]:
    sequences = [sample.chunk.sequence for sample in samples]
    filters = np.array([seq.filters for seq in sequences]).reshape(-1, 4).T
    return {
        "seeds": [seq.seed for seq in sequences],
        "places": [sample.place for sample in samples],
        **dict(zip(("temperature", "top_k", "top_p", "min_p"), filters, strict=True)),
    }


def _scored(chunk: Chunk) -> range:
    """Return the prompt positions of the chunk that are still to be scored."""
    seq = chunk.sequence
    first = seq.prompt_len - 1 - seq.num_unscored
    return range(max(chunk.start, first), min(chunk.start + chunk.length, seq.prompt_len - 1))
