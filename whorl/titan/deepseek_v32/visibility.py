"""Which keys each query may attend to, by position, for a batch of sequences stored as flat tokens.

Tokens of a batch of B sequences are stored one sequence after the other: queries [B * S, ...], keys [B * T, ...]. A
query never sees keys of another sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.ops.indexer.bounds import chunks, visible_keys
from whorl.ops.sparse_attention.bits import WORD, num_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """The visible keys of each query.

    With positions, a query sees the keys whose position is below its `ends`. If both are None, tokens are stored in the
    order of the sequence, and a query sees the keys up to its own.
    """

    batch: int  # number of sequences, B
    ends: Tensor | None  # [B, S] int32: the first position that a query does not see
    keys: Tensor | None  # [B, T] int32: the positions of the keys

    @staticmethod
    def from_positions(batch: int, q_positions: Tensor | None, k_positions: Tensor | None) -> "Visibility":
        """Return the visibility of queries and keys at q_positions [B or 1, S] and k_positions [B or 1, T].

        If one of them is None, tokens are in the order of the sequence.
        """
        if q_positions is None or k_positions is None:
            return Visibility(batch=batch, ends=None, keys=None)
        ends, keys = (q_positions + 1).int(), k_positions.int()
        return Visibility(batch=batch, ends=ends.expand(batch, -1), keys=keys.expand(batch, -1))

    def bounds(self, sequence: int) -> dict[str, Any]:
        """Return the arguments `starts`, `ends` and `key_positions` of the indexer operators for all its queries.

        sequence: the number of a sequence in the batch.
        """
        if self.ends is None or self.keys is None:
            return {"starts": None, "ends": None, "key_positions": None}
        ends = self.ends[sequence].contiguous()
        # Positions start at 0.
        return {"starts": torch.zeros_like(ends), "ends": ends, "key_positions": self.keys[sequence].contiguous()}

    def chunk_bounds(self, sequence: int, rows: slice, device: torch.device) -> dict[str, Any]:
        """Return the same for a chunk of the queries. rows: the chunk.

        Without positions the bounds are written out, because by default the operators assume that the last of their
        queries is at the last key.
        """
        bounds = self.bounds(sequence)
        ends = bounds["ends"]
        chunk_ends = torch.arange(rows.start + 1, rows.stop + 1, device=device).int() if ends is None else ends[rows]
        return bounds | {"starts": torch.zeros_like(chunk_ends), "ends": chunk_ends}


def split_sequences(batch: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split every tensor [B * S, ...] into its sequences; return one tuple of tensors per sequence."""
    if batch == 1:
        return [tensors]
    return list(zip(*(x.unflatten(0, (batch, -1)).unbind(0) for x in tensors), strict=True))


def visible_bits(visibility: Visibility, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return a bit mask of the visible keys in the format of `ops.selection_mask`: [B * S, ceil(B * T / 32)] int32.

    num_queries, num_keys: S and T of one sequence.
    """
    total = visibility.batch * num_keys
    powers = (1 << torch.arange(WORD, device=device)).long()
    words = []
    for sequence in range(visibility.batch):
        for rows in chunks(num_queries, total):
            bounds = visibility.chunk_bounds(sequence, rows, device)
            seen = visible_keys(rows.stop - rows.start, num_keys, **bounds, device=device)
            left = sequence * num_keys
            width = num_words(total) * WORD
            seen = torch.nn.functional.pad(seen, (left, width - left - num_keys))
            words.append((seen.unflatten(1, (-1, WORD)) * powers).sum(-1).int())
    return torch.cat(words)
