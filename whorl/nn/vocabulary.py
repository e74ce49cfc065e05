"""The embedding and the head."""

import torch
from torch import Tensor

from .ranks import ONE, Ranks
from .weight import Matrix, Part


class Vocabulary(Matrix):
    """One row per token, for the embedding and for the head. Ranks share the rows; the last may hold fewer.

    is_embedding, is_head: what the model uses it for, which may be both.
    """

    def __init__(
        self, size: int, width: int, *, is_embedding: bool = False, is_head: bool = False, ranks: Ranks = ONE
    ) -> None:
        unit = ranks.unit.rows
        per_rank = -(-size // (ranks.size * unit)) * unit
        first = min(ranks.rank * per_rank, size)
        held = slice(first, min(first + per_rank, size))
        super().__init__((per_rank, width), [Part(name="", shape=(size, width), rows=held, columns=slice(0, width))])
        self.size, self.ranks, self.start, self.stop = size, ranks, held.start, held.stop
        self.is_embedding, self.is_head = is_embedding, is_head

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return self.format.lookup(self, token_ids)
        is_mine = (token_ids >= self.start) & (token_ids < self.stop)
        rows = self.format.lookup(self, (token_ids - self.start) * is_mine)
        return self.ranks.sum(torch.where(is_mine[:, None], rows, 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ranks.gather(self.format.linear(self, hidden, None))[:, : self.size]

    def step_bytes(self, batch: int) -> float:
        """As an embedding a row a sequence, as a head all."""
        held = super().step_bytes(batch)
        return self.is_embedding * batch * held / self.shape[0] + self.is_head * held

    def prompt_flops(self, num_tokens: int) -> float:
        """The head sees a prompt's last token."""
        return super().prompt_flops(1) * self.is_head
