"""Where the new tokens of running sequences lie: for operators that work on their lanes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values
from .._tracing import is_readable


class Piece(NamedTuple):
    """New tokens of a sequence: rows first to end (exclusive) of the call, from position `start` on."""

    lane: int
    first: int
    end: int
    start: int


def pieces(lanes: Tensor, query_starts: Tensor, context_lens: Tensor) -> Iterator[Piece]:
    """Yield the new tokens of each sequence that has some; this reads all three tensors on the host."""
    starts = query_starts.tolist()
    for lane, first, end, length in zip(lanes.tolist(), starts, starts[1:], context_lens.tolist(), strict=False):
        if end > first:
            yield Piece(lane, first, end, length - (end - first))


def check_pieces(name: str, num_tokens: int, lanes: Tensor, query_starts: Tensor, context_lens: Tensor) -> None:
    """Raise ValueError for sequences that are none, or two in one lane, if all three tensors are `is_readable`."""
    if not all(map(is_readable, (lanes, query_starts, context_lens))):
        return
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
        raise ValueError(
            f"{name}: query_starts are {starts}, expected 0 first, none below the one before, and {num_tokens} at most"
        )
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        if end > first and lengths[b] < end - first:
            raise ValueError(
                f"{name}: sequence {b} has {end - first} new tokens and context_lens {lengths[b]}, expected at least "
                "as many: context_lens count the new tokens too"
            )
    used = [piece.lane for piece in pieces(lanes, query_starts, context_lens)]
    if len(set(used)) < len(used):
        raise ValueError(f"{name}: lanes are {used}, expected a lane of its own for every sequence with new tokens")


def draw_lanes(draw: Draw, queries: Sequence[int], contexts: Sequence[int], idle: int) -> Values:
    """Return the lanes and lengths of the sequences of a case, by name, and its sizes T and M.

    queries, contexts: new tokens and tokens of each sequence; idle: tokens past the last one. Lanes are in no order.
    """
    count = len(queries)
    lanes = (torch.arange(count) * 2 + 1) % (2 * count + 1)
    lengths = torch.tensor(contexts, dtype=torch.int32).to(draw.device)
    tensors = {"lanes": lanes.to(draw.device), "query_starts": draw.offsets(queries), "context_lens": lengths}
    return {**tensors, "T": sum(queries) + idle, "M": 2 * count + 1}
