"""What the device knows of each running sequence: its last token and its block table, by lane."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whorl.device import is_interpreting, lasting, unavailable


class Lanes:
    """Of up to `count` sequences with `width` blocks each. Lane `spare` belongs to rows that only fill a call up.

    beside: lanes of the same sizes, whose block tables are these, too.
    """

    def __init__(self, count: int, width: int, device: str, beside: "Lanes | None" = None) -> None:
        self.width, self.spare, self._device = width, count, device
        self.tokens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        fresh = torch.zeros(count + 1, width, dtype=torch.int32, device=device)
        self.tables: Tensor = fresh if beside is None else beside.tables
        assert self.tables.shape == fresh.shape, "runners side by side have the same lanes and lengths"
        self._is_fused = not is_interpreting() and unavailable("triton", torch.device(device).type) is None

    def admit(self, lane: int, blocks: list[int]) -> None:
        """The whole table of a new sequence."""
        new = lasting(torch.tensor(blocks, dtype=torch.int32), self._device)
        self.tables[lane, : len(blocks)].copy_(new, non_blocking=True)

    def read(self, given: Mapping[str, Tensor], width: int, *, is_decode: bool) -> tuple[Tensor, Tensor]:
        """Token ids [T] of a call's rows, and the first `width` blocks [B, width] of its sequences.

        given: the call's arrays (batch.py). Of a decoding call each row first writes its block to its lane, where it
        may be new; a prompt's were sent when it was admitted.
        """
        is_padded = len(given["entry_lanes"]) == len(given["tokens"])
        if is_decode and is_padded and self._is_fused:
            from .lanes_triton import read

            return read(self.tokens, self.tables, given, width)
        if is_decode:
            self.tables.view(-1).index_copy_(0, given["table_at"], given["blocks"])
        tokens = given["tokens"]
        token_ids = torch.where(tokens < 0, self.tokens[given["lanes"]], tokens)
        return token_ids, self.tables[:, :width].index_select(0, given["entry_lanes"])

    def keep(self, lanes: Tensor, token_ids: Tensor) -> None:
        """The last token of each."""
        self.tokens.index_copy_(0, lanes, token_ids)
