"""The interface of models that the engine uses."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .cache import CacheSpec, StateSpec
from .step import Step


class Model(Protocol):
    """The interface of models that the engine uses.

    A vision model also has a `tower` with `begin` and `advance`, which encode an image layer by layer, and in `config`
    the ids of its placeholder tokens and its position rule; `whorl.models.qwen3_vl` is an example. A model that
    computes from another model's hidden states says in `state_size` how many channels these have;
    `whorl.models.deepseek_mtp` is one.
    """

    config: Any
    dtype: torch.dtype  # of hidden states; caches have their own, `CacheSpec.dtype`
    vocab_size: int
    max_length: int  # tokens of the longest sequence that the rotary table serves

    def cache_specs(self) -> Sequence[CacheSpec | StateSpec]:
        """Return the spec of each cache that `forward` takes, in its order."""

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        """Return hidden states [T, C], after the final norm, and write the tokens' entries into the caches.

        caches: each as its spec's `empty` returned it; for a `StateSpec` the tensors by name.
        """

    def attention_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of attention between the tokens of a prompt, in all layers."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of hidden [N, C], in the dtype of the product."""
