"""A batch turns the chunks of a step into the indices of one or two forward calls. No other module builds indices.

Prompts and decoding sequences share a call, or each has its own: the runner knows whether they may.
"""

from collections.abc import Sequence

import numpy as np

from .batch_images import axes_of, inserts_of, rotary_positions
from .call import Call, PlacedChunk, Sample, Score
from .host_blocks import Carry, FileMove
from .sampling_params import FILTERS
from .scheduler import Chunk
from .states import Move

UNREAD = -1  # in `tokens`: the token is only on the device, as the last one sampled in its lane


class Batch:
    """The chunks of a step. Drafts may be added to them until `calls` builds the indices.

    is_eager: the step runs as if its size were not recorded, for the warm-up. moves: copies of states that precede it.
    """

    def __init__(self, chunks: Sequence[Chunk], *, is_eager: bool = False) -> None:
        self.chunks, self.is_eager = list(chunks), is_eager
        self.moves: list[Move | Carry | FileMove] = []

    @property
    def num_prompts(self) -> int:
        return sum(not chunk.is_decode for chunk in self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks if not chunk.is_decode)

    @property
    def num_tokens(self) -> int:
        """The tokens of all chunks, drafts included."""
        return sum(chunk.length + len(chunk.draft) for chunk in self.chunks)

    @property
    def has_images(self) -> bool:
        return any(chunk.sequence.placement is not None for chunk in self.chunks)

    def calls(self, block_size: int, table_width: int, *, is_joined: bool = False) -> list[Call]:
        """Return the calls of the step, prompts first; is_joined: one call of prompts and decoding sequences.

        table_width: blocks of one lane in the device's block tables.
        """
        prompts = [chunk for chunk in self.chunks if not chunk.is_decode]
        decoding = [chunk for chunk in self.chunks if chunk.is_decode]
        groups = ([*prompts, *decoding],) if is_joined else (prompts, decoding)
        calls = [_build_call(chunks, block_size, table_width) for chunks in groups if chunks]
        for call in calls:
            call.is_eager = self.is_eager
        for call in calls[:1]:
            call.moves = self.moves
        return calls


def _build_call(chunks: Sequence[Chunk], block_size: int, table_width: int) -> Call:
    """Return the call of these chunks, prompts first. Arguments as for `Batch.calls`."""
    tokens: list[int] = []
    lanes: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    starts, contexts, entry_lanes = [0], [], []
    samples: list[Sample] = []
    sample_indices: list[int] = []
    scores: list[Score] = []
    score_indices: list[int] = []
    tables = []
    with_images: list[tuple[int, Chunk]] = []
    placed = []
    for chunk in chunks:
        seq, first_token, start = chunk.sequence, len(tokens), chunk.start
        end = start + chunk.length + len(chunk.draft)
        tokens += _tokens(chunk)
        positions += range(start, end)
        lanes += [seq.lane] * (end - start)
        blocks += _blocks(seq.block_table, start, end, block_size)
        starts.append(len(tokens))
        contexts.append(end)
        entry_lanes.append(seq.lane)
        placed.append(PlacedChunk(chunk, first_token, seq.lane, seq.block_table))
        if seq.placement is not None:
            with_images.append((first_token, chunk))
        if chunk.is_new:
            tables.append((seq.lane, seq.block_table, seq.slot))
        if chunk.is_last:
            samples += [Sample(chunk, i, place) for i, place in enumerate(_places(chunk))]
            sample_indices += range(first_token + chunk.length - 1, len(tokens))
        if seq.params.embed and not chunk.is_decode and end == seq.prompt_len:
            scores.append(Score(seq, end - 1))
            score_indices.append(len(tokens) - 1)
        if seq.num_unscored:
            for position in _scored(chunk):
                scores.append(Score(seq, position))
                score_indices.append(first_token + position - start)
    index, block = np.array(positions), np.array(blocks)
    lane = np.array(lanes)
    arrays = {
        "tokens": tokens,
        "lanes": lane,
        "positions": rotary_positions(index, with_images) if chunks[0].is_decode else index,
        "slots": block * block_size + index % block_size,
        "table_at": lane * table_width + index // block_size,
        "blocks": block,
        "entry_lanes": entry_lanes,
        "query_starts": starts,
        "context_lens": contexts,
        "sample_indices": sample_indices,
        "sample_lanes": lane[sample_indices],
        **_sampling(samples),
    }
    num_prompts = sum(not chunk.is_decode for chunk in chunks)
    call = Call(num_prompts, arrays, max(contexts), tables, samples, scores, score_indices, placed=placed)
    call.is_adapted = any(chunk.sequence.slot >= 0 for chunk in chunks)
    if with_images and not call.is_decode:
        call.axes = axes_of(index, with_images)
        call.inserts = [insert for first_token, chunk in with_images for insert in inserts_of(first_token, chunk)]
    return call


def _tokens(chunk: Chunk) -> list[int]:
    """Return the token ids of a chunk and its draft; UNREAD for a token that the host has not read yet."""
    known = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
    return (known or [UNREAD]) + chunk.draft


def _blocks(table: list[int], start: int, end: int, block_size: int) -> Sequence[int]:
    """Return the block of each position."""
    if end - start == 1:
        return (table[start // block_size],)
    first = start // block_size
    blocks = np.array(table[first : (end - 1) // block_size + 1])  # only those of the chunk: a table may be long
    return blocks[np.arange(start, end) // block_size - first].tolist()  # type: ignore[no-any-return]


def _places(chunk: Chunk) -> range:
    """Return the indices, among the sequence's outputs, of the tokens that a chunk samples."""
    first = chunk.start + chunk.length - chunk.sequence.prompt_len
    return range(first, first + len(chunk.draft) + 1)


def _sampling(samples: Sequence[Sample]) -> dict[str, list[int] | np.ndarray]:
    """Return the arrays of a call that `ops.sample` takes, one element for each sample."""
    sequences = [sample.chunk.sequence for sample in samples]
    filters = np.array([seq.filters for seq in sequences]).reshape(-1, len(FILTERS)).T
    return {
        "seeds": [seq.seed for seq in sequences],
        "places": [sample.output_index for sample in samples],
        **dict(zip(FILTERS, filters, strict=True)),
    }


def _scored(chunk: Chunk) -> range:
    """Return the prompt positions of the chunk that are still to be scored."""
    seq = chunk.sequence
    first = seq.prompt_len - 1 - seq.num_unscored
    return range(max(chunk.start, first), min(chunk.start + chunk.length, seq.prompt_len - 1))
