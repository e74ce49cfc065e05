"""What the engine needs of a model."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .cache import CacheSpec
from .experts import Experts
from .linear import Linear
from .norm import RMSNorm
from .step import Rows, Step
from .vocabulary import Vocabulary
from .weight import Slot


class Model(Protocol):
    """What the engine needs of a model."""

    config: Any
    dtype: torch.dtype  # of hidden states; a layer's cache has its own, `CacheSpec.dtype`
    vocab_size: int
    max_length: int  # longest sequence the rotary table serves

    def cache_specs(self) -> Sequence[CacheSpec]:
        """One for each cache that `forward` takes, in its order."""

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        """Hidden states [T, C], final norm included; writes the tokens' entries into the caches, each as its spec's
        `empty` made it."""

    def logits(self, hidden: Tensor, *, rows: Rows = "decode") -> Tensor:
        """[N, V] fp32 from hidden [N, C]."""


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every tensor a checkpoint must hold for this model, by Hugging Face's name."""
    found: dict[str, Slot] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | Vocabulary | RMSNorm | Experts):
            found.update(module.slots(name))
    return found
