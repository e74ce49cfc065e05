"""What one step computes, as the tensors of at most two forward calls. The only place that builds indices.

Prompt tokens and generated tokens go through different kernels, so a mixed step makes two calls. Decode kernels take
up to 16 rows of a sequence; a longer run is laid out as several entries over one block table, which sees the same keys
because a layer writes every row's keys and values before any row attends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whorl.nn import Step

from .scheduler import Chunk
from .sequence import CLASS, PROMPT
from .sequence import Sequence as Seq

MAX_DECODE_ROWS = 16  # of one sequence in one entry of a decode call


@dataclass(frozen=True, slots=True)
class Sample:
    """A row whose logits give a token: the one behind `num_drafted` of the chunk's draft."""

    chunk: Chunk
    num_drafted: int

    @property
    def place(self) -> int:
        """Of the token among the sequence's outputs."""
        return self.chunk.sequence.num_outputs + self.num_drafted


@dataclass(frozen=True, slots=True)
class Score:
    """A row whose logits score the prompt token at `position + 1`."""

    sequence: Seq
    position: int


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call, and which of its rows give `samples` and `scores`, in order."""

    step: Step
    sample_rows: Tensor
    score_rows: Tensor


class Batch:
    """The chunks of a step. Drafts may be added to them until `calls` lays everything out."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        # Prompts before generated tokens: the order of the calls is the order of the rows.
        self.chunks = sorted(chunks, key=lambda chunk: _role(chunk) != PROMPT)
        self.samples: list[Sample] = []
        self.scores: list[Score] = []

    def calls(self, block_size: int, device: torch.device | str) -> list[Call]:
        self.samples, self.scores = [], []
        found = []
        for role in sorted({_role(chunk) for chunk in self.chunks}):
            found.append(self._call([c for c in self.chunks if _role(c) == role], role, block_size, device))
        return found

    def _call(self, chunks: Sequence[Chunk], role: int, block_size: int, device: torch.device | str) -> Call:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths, contexts, tables = [], [], []
        sample_rows: list[int] = []
        score_rows: list[int] = []
        for chunk in chunks:
            seq, first_row = chunk.sequence, len(token_ids)
            end = chunk.start + chunk.length
            token_ids += seq.token_ids[chunk.start : end] + chunk.draft
            end += len(chunk.draft)
            positions += range(chunk.start, end)
            slots += [seq.block_table[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)]
            for start, stop in _entries(chunk.start, end, role):
                lengths.append(stop - start)
                contexts.append(stop)
                tables.append(seq.block_table)
            if chunk.is_last:
                self.samples += [Sample(chunk, i) for i in range(len(chunk.draft) + 1)]
                sample_rows += range(first_row + chunk.length - 1, len(token_ids))
            score = _scored(chunk)
            self.scores += [Score(seq, position) for position in score]
            score_rows += [first_row + position - chunk.start for position in score]
        step = Step(
            token_ids=_tensor(token_ids, device),
            positions=_tensor(positions, device),
            slots=_tensor(slots, device),
            block_tables=_tensor(_pad(tables), device, torch.int32),
            query_starts=_tensor(np.cumsum([0, *lengths]), device, torch.int32),
            context_lens=_tensor(contexts, device, torch.int32),
            rows=CLASS[role],
            max_position=max(contexts),
        )
        return Call(step, _tensor(sample_rows, device), _tensor(score_rows, device))


def _role(chunk: Chunk) -> int:
    return chunk.sequence.roles[chunk.start]


def _entries(start: int, end: int, role: int) -> Iterator[tuple[int, int]]:
    size = end - start if role == PROMPT else MAX_DECODE_ROWS
    for first in range(start, end, size):
        yield first, min(first + size, end)


def _scored(chunk: Chunk) -> range:
    """Positions of the chunk whose logits the request wants and has not got."""
    seq = chunk.sequence
    if not seq.num_unscored:
        return range(0)
    first = seq.prompt_len - 1 - seq.num_unscored
    return range(max(chunk.start, first), min(chunk.start + chunk.length, seq.prompt_len - 1))


def _pad(tables: Sequence[Sequence[int]]) -> np.ndarray:
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _tensor(values: Sequence[int] | np.ndarray, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)
