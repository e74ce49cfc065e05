"""Lanes hold, on the device, the last token, the block table and the adapter of each running sequence."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whorl.device import is_interpreting, lasting, unavailable


class Lanes:
    """Lanes of up to `count` sequences with `width` blocks each. Lane `spare` belongs to tokens that only pad a call.

    share_tables_with: lanes of the same sizes whose block tables are used instead of new ones.
    """

    def __init__(self, count: int, width: int, device: str, share_tables_with: "Lanes | None" = None) -> None:
        self.width, self.spare, self._device = width, count, device
        self.tokens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        empty = torch.zeros(count + 1, width, dtype=torch.int32, device=device)
        self.tables: Tensor = empty if share_tables_with is None else share_tables_with.tables
        assert self.tables.shape == empty.shape, "runners that share block tables need the same lanes and lengths"
        self.slots = torch.full((count + 1,), -1, dtype=torch.int32, device=device)  # of each lane's adapter; -1: none
        self._known_slots = [-1] * (count + 1)
        self._is_fused = not is_interpreting() and unavailable("triton", torch.device(device).type) is None

    def admit(self, lane: int, blocks: list[int], slot: int = -1) -> None:
        """Write the whole block table of a new sequence. slot: of its adapter."""
        if slot != self._known_slots[lane]:
            self._known_slots[lane] = slot
            self.slots[lane].fill_(slot)
        new = lasting(torch.tensor(blocks, dtype=torch.int32), self._device)
        self.tables[lane, : len(blocks)].copy_(new, non_blocking=True)

    def read(self, inputs: Mapping[str, Tensor], width: int, *, is_decode: bool) -> tuple[Tensor, Tensor]:
        """Return the token ids [T] of a call, and the first `width` blocks [B, width] of its sequences.

        inputs: the call's arrays (call.py). In a decode call each token first writes its block, which may be new, to
        the table of its lane; a prompt's blocks were written by `admit`.
        """
        # The kernel has one program for token i and sequence i, so it needs as many (padded) sequences as tokens.
        has_equal_counts = len(inputs["entry_lanes"]) == len(inputs["tokens"])
        if is_decode and has_equal_counts and self._is_fused:
            from .kernels_triton import read

            return read(self.tokens, self.tables, inputs, width)
        if is_decode:
            self.write_blocks(inputs)
        tokens = inputs["tokens"]
        token_ids = torch.where(tokens < 0, self.tokens[inputs["lanes"]], tokens)
        return token_ids, self.tables[:, :width].index_select(0, inputs["entry_lanes"])

    def write_blocks(self, inputs: Mapping[str, Tensor]) -> None:
        """Write the block of each token of a call to the table of its lane."""
        self.tables.view(-1).index_copy_(0, inputs["table_at"], inputs["blocks"])

    def keep(self, lanes: Tensor, token_ids: Tensor) -> None:
        """Store token_ids [N] as the last tokens of `lanes` [N]; of equal lanes any one token is kept."""
        self.tokens.index_copy_(0, lanes, token_ids)
