"""Engines whose sequences find their keys in the cache: nothing waits for long prompts before decoding is timed.

The blocks hold random numbers, not what the model would have written: attention takes as long for either.
"""

import dataclasses

import torch
from torch import Tensor

from whorl.engine.blocks import BlockPool
from whorl.engine.llm import LLM
from whorl.engine.sequence import Sequence

_CODES = 120  # below 127, which is NaN in fp8
_BYTES = 0x3C, 0x40  # of pages of bytes: as e4m3, as bf16 and as fp32 such bytes are numbers between 0.01 and 2


class _FilledPool(BlockPool):
    """Gives out blocks as if they held all of a prompt but its last token, whose logits are needed."""

    def admit(self, seq: Sequence, *, reserve: int = 0) -> bool:
        is_admitted = super().admit(seq, reserve=reserve)
        if is_admitted:
            seq.num_computed = len(seq.token_ids) - 1
        return is_admitted


def fill(llm: LLM) -> None:
    """Whoever is admitted from now on has his prompt in the cache."""
    for cache in llm.runner.caches:
        generator: torch.Generator | None = None
        for field in dataclasses.fields(cache):
            values = getattr(cache, field.name)
            if not isinstance(values, Tensor):
                continue
            generator = generator or torch.Generator(values.device).manual_seed(0)
            if values.dtype == torch.uint8:
                values.random_(*_BYTES, generator=generator)
            elif values.itemsize == 1:  # codes: finite ones, of either format
                values.view(torch.int8).random_(0, _CODES, generator=generator)
            else:
                values.normal_(generator=generator)
    # In place: the scheduler has it, and a proposer may.
    llm.pool.__class__, llm.pool.use_prefix_cache = _FilledPool, False
