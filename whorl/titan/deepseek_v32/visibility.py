"""Who sees whom: which keys come before a query, by position, of flat tokens in sequences."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.ops.indexer.bounds import chunks, visible_keys
from whorl.ops.sparse_attention.bits import WORD, num_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Sees:
    """Who sees whom: bounds of each sequence's queries in positions, or, all None, causal in the order they lie in."""

    batch: int
    ends: Tensor | None  # [B, S] int32
    keys: Tensor | None  # [B, T] int32

    @staticmethod
    def of(batch: int, q_positions: Tensor | None, k_positions: Tensor | None) -> "Sees":
        if q_positions is None or k_positions is None:
            return Sees(batch=batch, ends=None, keys=None)
        ends, keys = (q_positions + 1).int(), k_positions.int()
        return Sees(batch=batch, ends=ends.expand(batch, -1), keys=keys.expand(batch, -1))

    def bounds(self, sequence: int) -> dict[str, Any]:
        """For all queries of a sequence."""
        if self.ends is None or self.keys is None:
            return {"starts": None, "ends": None, "key_positions": None}
        ends = self.ends[sequence].contiguous()
        # Positions count from 0.
        return {"starts": torch.zeros_like(ends), "ends": ends, "key_positions": self.keys[sequence].contiguous()}

    def bounds_of(self, sequence: int, rows: slice, device: torch.device) -> dict[str, Any]:
        """For some: causal by row number is something a part has to be told."""
        whole = self.bounds(sequence)
        ends = whole["ends"]
        part = torch.arange(rows.start + 1, rows.stop + 1, device=device).int() if ends is None else ends[rows]
        return whole | {"starts": torch.zeros_like(part), "ends": part}


def each(batch: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """[B * S, ...] of every tensor by sequence."""
    if batch == 1:
        return [tensors]
    return list(zip(*(x.unflatten(0, (batch, -1)).unbind(0) for x in tensors), strict=True))


def visible_bits(sees: Sees, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """A bit for every key that is seen, as `selection_mask` has one for every key that is chosen."""
    total = sees.batch * num_keys
    powers = (1 << torch.arange(WORD, device=device)).long()
    words = []
    for sequence in range(sees.batch):
        for rows in chunks(num_queries, total):
            bounds = sees.bounds_of(sequence, rows, device)
            seen = visible_keys(rows.stop - rows.start, num_keys, **bounds, device=device)
            before = sequence * num_keys
            room = num_words(total) * WORD
            seen = torch.nn.functional.pad(seen, (before, room - before - num_keys))
            words.append((seen.unflatten(1, (-1, WORD)) * powers).sum(-1).int())
    return torch.cat(words)
