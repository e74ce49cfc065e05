"""A call is what one forward call computes, as indices on the host.

Its arrays lie one after the other in one buffer, so that one copy takes them to the device.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .batch_images import Insert
from .host_blocks import Carry, FileMove
from .sampling_params import FILTERS
from .scheduler import Chunk
from .sequence import Sequence as Seq
from .states import Move

# Name, type and length of each array; T: tokens, B: sequences ("entries"), S: samples.
# By token: its id, its sequence's lane, its position, its slot in the KV cache, its block, and where that block belongs
# in the flattened block tables (table_at).
# By sequence: its lane (entry_lanes), its first token (query_starts, and T at the end), and its length including this
# call (context_lens).
# By sample: the token whose logits are sampled (sample_indices), its lane, the index of the sampled token among its
# sequence's outputs (places), and the filters of tokens.
_FIELDS = (
    ("tokens", "i8", "T"),
    ("lanes", "i8", "T"),
    ("positions", "i8", "T"),
    ("slots", "i8", "T"),
    ("table_at", "i8", "T"),
    ("entry_lanes", "i8", "B"),
    ("sample_indices", "i8", "S"),
    ("sample_lanes", "i8", "S"),
    ("seeds", "i8", "S"),
    ("places", "i8", "S"),
    ("blocks", "i4", "T"),
    ("query_starts", "i4", "B+1"),
    ("context_lens", "i4", "B"),
    *((name, kind, "S") for name, kind in FILTERS.items()),
)
Size = tuple[int, int, int]  # T, B, S
Field = tuple[str, str, int, int]  # name, type, first byte, number of elements
_ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for an array that begins elsewhere


@functools.lru_cache(maxsize=256)
def field_offsets(size: Size) -> tuple[tuple[Field, ...], int]:
    """Return where each array of a call of this size lies in the buffer, and the bytes of all arrays."""
    counts = {"T": size[0], "B": size[1], "B+1": size[1] + 1, "S": size[2]}
    fields, num_bytes = [], 0
    for name, kind, count in _FIELDS:
        fields.append((name, kind, num_bytes, counts[count]))
        num_bytes += int(kind[1]) * counts[count]
        num_bytes += -num_bytes % _ALIGNMENT
    return tuple(fields), num_bytes


def field_views(buffer: np.ndarray, size: Size) -> dict[str, np.ndarray]:
    """Return the arrays of a call of this size as views of a buffer of bytes."""
    return {
        name: buffer[start : start + int(kind[1]) * count].view(kind)
        for name, kind, start, count in field_offsets(size)[0]
    }


@dataclass(slots=True, eq=False)
class Sample:
    """A token to be sampled: the one that follows the first `num_drafted` tokens of the chunk's draft."""

    chunk: Chunk
    num_drafted: int
    output_index: int  # index of the sampled token among the sequence's outputs


@dataclass(frozen=True, slots=True)
class Score:
    """A prompt position whose hidden state is used. At the last position of the prompt the state itself is the prompt's
    embedding; at any other its logits give the log-probability of the prompt token at `position + 1`."""

    sequence: Seq
    position: int


class PlacedChunk(NamedTuple):
    """A chunk in a call. first_token: index of its first token in the call. lane, block_table: those of its sequence
    when the call was built: the sequence may be finished or preempted before the results are used."""

    chunk: Chunk
    first_token: int
    lane: int
    block_table: list[int]


@dataclass(slots=True, eq=False)
class Call:
    """One forward call, on the host. arrays: see `_FIELDS`. samples, scores: the positions whose outputs are used.

    num_prompts: the sequences that compute a part of their prompt; they come first, and the others decode.
    score_indices: the token of each score. axes: [A, T] rotary positions of a prompt call in which a sequence has
    images, instead of the array `positions`; else None. inserts: image features that replace embeddings. placed: its
    chunks. moves: copies of states that precede it. is_eager: no graph may replay it. is_adapted: some sequence has an
    adapter.
    """

    num_prompts: int
    arrays: Mapping[str, Sequence[float] | np.ndarray]
    num_keys: int  # tokens that the longest sequence attends to
    tables: list[tuple[int, list[int], int]]  # new lanes, their block tables and the slots of their adapters
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    score_indices: list[int] = field(default_factory=list)
    axes: np.ndarray | None = None
    inserts: list[Insert] = field(default_factory=list)
    placed: list[PlacedChunk] = field(default_factory=list)
    moves: list[Move | Carry | FileMove] = field(default_factory=list)
    is_eager: bool = False
    is_adapted: bool = False

    @property
    def size(self) -> Size:
        return len(self.arrays["tokens"]), len(self.arrays["context_lens"]), len(self.arrays["seeds"])

    @property
    def is_decode(self) -> bool:
        """Whether it has no prompts."""
        return not self.num_prompts

    @property
    def decoding_from(self) -> tuple[int, int] | None:
        """The first token and sequence that decode, in a call that also has prompts; else None."""
        is_mixed = 0 < self.num_prompts < self.size[1]
        return (int(self.arrays["query_starts"][self.num_prompts]), self.num_prompts) if is_mixed else None

    @property
    def is_dense(self) -> bool:
        """Whether every token is sampled from, as in decoding with or without drafts."""
        return len(self.arrays["tokens"]) == len(self.arrays["seeds"])

    def write(
        self, arrays: dict[str, np.ndarray], padding: dict[str, int], decoding_from: tuple[int, int] | None = None
    ) -> None:
        """Copy the call's arrays to arrays of this size or larger; `padding` has the values of further elements.

        decoding_from: the token and the sequence from which those that decode are written; padding fills the room
        between them and the prompts. Default: they follow the prompts.
        """
        source = self.arrays
        if decoding_from is not None and decoding_from != self.decoding_from:
            source = self._moved(decoding_from, padding)
        for name, values in source.items():
            array, count = arrays[name], len(values)
            array[:count] = values
            if count < len(array):
                array[count:] = values[-1] if name == "query_starts" else padding.get(name, 0)

    def _moved(self, to: tuple[int, int], padding: dict[str, int]) -> dict[str, np.ndarray]:
        """Return the arrays with padding between the prompts and what decodes, which begins at token and sequence `to`.

        The sequences that pad the prompts are empty. The last prompt ends where they begin, not at the token `to`.
        """
        assert self.decoding_from is not None
        (token, sequence), (to_token, to_sequence) = self.decoding_from, to
        at, gaps = {"T": token, "B": sequence}, {"T": to_token - token, "B": to_sequence - sequence}
        moved = {name: np.asarray(values) for name, values in self.arrays.items()}
        for name, _, length in _FIELDS:
            if length in at:
                prompts, decoding = np.split(moved[name], (at[length],))
                filling = np.full(gaps[length], padding.get(name, 0))
                moved[name] = np.concatenate((prompts, filling, decoding))
        prompts, decoding = np.split(moved["query_starts"], (sequence + 1,))
        moved["query_starts"] = np.concatenate((prompts, np.full(gaps["B"], token), decoding + gaps["T"]))
        indices = moved["sample_indices"]
        moved["sample_indices"] = np.where(indices < token, indices, indices + gaps["T"])
        return moved
