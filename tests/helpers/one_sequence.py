"""A model's forward calls for one sequence, without the engine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.nn import States, StateSpec, Step

BLOCK = 4
PROMPT = [(7 * i + 3) % 89 + 1 for i in range(21)]


class Runner:
    """One sequence through a model: blocks in no order, positions counted."""

    def __init__(self, model: Any, max_tokens: int = 128) -> None:
        self.model, self.length = model, 0
        num_blocks = -(-max_tokens // BLOCK)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.table = order.int()[None]
        specs = model.cache_specs()
        states = iter(States([spec for spec in specs if isinstance(spec, StateSpec)], 1, 0, "cpu").caches)
        self.caches = [
            next(states) if isinstance(spec, StateSpec) else spec.empty(num_blocks, BLOCK, "cpu") for spec in specs
        ]

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [T, V]."""
        start, stop = self.length, self.length + len(token_ids)
        positions = torch.arange(start, stop)
        step = Step(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slots=self.table[0].long()[positions // BLOCK] * BLOCK + positions % BLOCK,
            block_tables=self.table,
            query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            context_lens=torch.tensor([stop], dtype=torch.int32),
            max_position=stop,
            lanes=torch.tensor([0]),
        )
        self.length = stop
        with torch.inference_mode():
            return self.model.logits(self.model.forward(step, self.caches))

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
        """Logits of every position seen and the tokens chosen."""
        logits = [self.run(prompt)]
        tokens = [int(logits[-1][-1].argmax())]
        while len(tokens) < count:
            logits.append(self.run(tokens[-1:]))
            tokens.append(int(logits[-1][-1].argmax()))
        return torch.cat(logits), tokens


def close(actual: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    error = float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())
    assert error < bound, error
