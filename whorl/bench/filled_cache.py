"""Engines whose KV cache already holds the keys of every prompt, so that decoding is timed without a long prefill.

The blocks hold random numbers instead of the model's keys and values, and so do the lanes of layers with states:
attention takes the same time. The numbers have both signs. Values of one sign would average to the same output of
attention for every sequence, and then all sequences choose the same experts.
"""

import dataclasses

import torch
from torch import Tensor

from whorl.engine.blocks import BlockPool
from whorl.engine.llm import LLM
from whorl.engine.sequence import Sequence
from whorl.engine.states import StatePool

_MOST = 1 << 28  # bytes of a mask
_CODES = 120  # upper bound of int8 and fp8 codes; 127 would be NaN in fp8
# For caches of raw bytes: read as e4m3, bf16 or fp32 these are numbers of a magnitude between 0.01 and 2.
_BYTES, _SIGN = (0x3C, 0x40), 0x80


class _FilledPool(BlockPool):
    """Admits a sequence as if its blocks held the whole prompt but the last token, whose logits are needed."""

    def admit(self, seq: Sequence, *, reserve: int = 0) -> bool:
        is_admitted = super().admit(seq, reserve=reserve)
        if is_admitted:
            seq.num_computed = len(seq.token_ids) - 1
        return is_admitted


class _FilledStates(StatePool):
    """Leaves lanes as they are."""

    def begin(self, seq: Sequence) -> None:
        seq.num_in_state = seq.num_computed


def fill(llm: LLM) -> None:
    """Fill the caches of an engine, and make it treat prompts admitted from now on as computed."""
    for cache in llm.runner.caches:
        generator: torch.Generator | None = None
        stored = (
            cache if isinstance(cache, dict) else {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache)}
        )
        for values in stored.values():
            if not isinstance(values, Tensor):
                continue
            generator = generator or torch.Generator(values.device).manual_seed(0)
            if values.dtype == torch.uint8:
                _fill_bytes(values, generator)
            elif values.itemsize == 1:  # int8 or fp8 codes that are finite in both
                values.view(torch.int8).random_(0, _CODES, generator=generator)
            else:
                values.normal_(generator=generator)
    # The class changes in place, since the scheduler and perhaps a proposer refer to this pool.
    llm.pool.__class__, llm.pool.use_prefix_cache = _FilledPool, False
    if llm.pool.states is not None:
        llm.pool.states.__class__ = _FilledStates


def _fill_bytes(values: Tensor, generator: torch.Generator) -> None:
    """Fill bytes with numbers of either sign, block by block, since a mask of the whole cache may not fit."""
    values.random_(*_BYTES, generator=generator)
    for block in values.split(max(1, _MOST // values[0].numel())):
        signs = torch.empty_like(block).random_(0, 2, generator=generator)
        block.bitwise_or_(signs.mul_(_SIGN))
