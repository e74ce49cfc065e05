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
    the ids of its placeholders and the rule of its positions; `whorl.models.qwen3_vl` is the example. One that computes
    from another's hidden states says by `state_size` how many channels these have; `whorl.models.deepseek_mtp` is it.
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
        """[N, V] from hidden [N, C], in the dtype of the product."""
