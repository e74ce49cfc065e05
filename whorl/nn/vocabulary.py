"""The matrix of the vocabulary: embedding, output head, or both."""

import torch
from torch import Tensor

from .ranks import ONE, Ranks
from .weight import Matrix, Part


class Vocabulary(Matrix):
    """One row per token id, for the embedding and for the output head.

    size: the number of token ids; width: channels. Ranks shard the rows: each has equally many in memory, and those of
    the last ranks that are past `size` are padding. is_embedding, is_head: what the model uses it for, which may be
    both.
    """

    def __init__(
        self, size: int, width: int, *, is_embedding: bool = False, is_head: bool = False, ranks: Ranks = ONE
    ) -> None:
        unit = ranks.unit.rows
        per_rank = -(-size // (ranks.size * unit)) * unit
        first = min(ranks.rank * per_rank, size)
        shard = slice(first, min(first + per_rank, size))
        super().__init__((per_rank, width), [Part(name="", shape=(size, width), rows=shard, columns=slice(0, width))])
        self.size, self.ranks, self.start, self.stop = size, ranks, shard.start, shard.stop
        self.is_embedding, self.is_head = is_embedding, is_head

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of token_ids [T], [T, width]."""
        if self.ranks.size == 1:
            return self.format.lookup(self, token_ids)
        is_local = (token_ids >= self.start) & (token_ids < self.stop)
        rows = self.format.lookup(self, (token_ids - self.start) * is_local)  # row 0 for tokens of other ranks
        return self.ranks.sum(torch.where(is_local[:, None], rows, 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, size] of hidden states [N, width]."""
        return self.ranks.gather(self.matmul(hidden))[:, : self.size]

    def matmul(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's rows: the one place where the matrix multiplies and an adapter adds."""
        y = self.format.linear(self, hidden, None)
        return y if self.adapter is None else self.adapter(y, hidden)

    def step_bytes(self, batch: int) -> float:
        """Return the bytes that a decode step reads: one row per sequence as an embedding, all rows as a head."""
        all_rows = super().step_bytes(batch)
        return self.is_embedding * batch * all_rows / self.shape[0] + self.is_head * all_rows

    def prompt_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of a prompt: the head multiplies its last token only."""
        return super().prompt_flops(1) * self.is_head
