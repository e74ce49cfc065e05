"""The embedding and the head."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from whorl import ops

from .ranks import ONE, Ranks
from .step import Rows
from .weight import ALL, Slot, parameter


class Vocabulary(nn.Module):
    """One row per token, for the embedding and for the head. Ranks share the rows; the last may hold fewer."""

    def __init__(self, size: int, width: int, *, ranks: Ranks = ONE) -> None:
        super().__init__()
        self.size, self.ranks = size, ranks
        per_rank = -(-size // ranks.size)
        self.start = min(ranks.rank * per_rank, size)
        self.stop = min(self.start + per_rank, size)
        self.weight = parameter(per_rank, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return nn.functional.embedding(token_ids, self.weight)
        is_mine = (token_ids >= self.start) & (token_ids < self.stop)
        rows = nn.functional.embedding((token_ids - self.start) * is_mine, self.weight)
        return self.ranks.sum(torch.where(is_mine[:, None], rows, 0))

    def logits(self, hidden: Tensor, rows: Rows) -> Tensor:
        return self.ranks.gather(ops.linear.unchecked(hidden, self.weight, rows=rows))[:, : self.size].float()

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        into = self.weight[: self.stop - self.start]
        shape = (self.size, self.weight.shape[1])
        yield f"{name}.weight", Slot(into=into, shape=shape, index=(slice(self.start, self.stop), ALL))
