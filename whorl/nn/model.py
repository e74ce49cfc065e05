"""What the engine needs of a model."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .cache import CacheSpec
from .step import Step


class Model(Protocol):
    """What the engine needs of a model.

    One that sees has more: a `tower` with `begin` and `advance`, which encode a picture layer by layer, and in `config`
    the ids of its placeholders and the rule of its positions; `whorl.models.qwen3_vl` is the example.
    """

    config: Any
    dtype: torch.dtype  # of hidden states; a layer's cache has its own, `CacheSpec.dtype`
    vocab_size: int
    max_length: int  # longest sequence the rotary table serves

    def cache_specs(self) -> Sequence[CacheSpec]:
        """One for each cache that `forward` takes, in its order."""

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        """Hidden states [T, C], final norm included; writes the tokens' entries into the caches, each as its spec's
        `empty` made it."""

    def attention_flops(self, num_tokens: int) -> float:
        """Of a prompt: what its tokens see of each other, in all layers."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] fp32 from hidden [N, C]."""


def recordable(model: Model, asked: bool | None) -> bool:
    """Whether a decode call of the model may be recorded as a graph: one says by `waits` why its calls wait for the
    device, which no recording does."""
    reason = getattr(model, "waits", None)
    if asked and reason is not None:
        raise ValueError(f"use_graphs was asked for: {reason}. Leave use_graphs out")
    return reason is None
