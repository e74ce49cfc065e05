"""Where the tensors of a checkpoint go."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

Index = tuple[slice, ...]
ALL = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes: its `index` part is copied `into` a view of a parameter."""

    into: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: Index


def parameter(*shape: int) -> nn.Parameter:
    """Not initialised: a model without its weights is refused by the loader."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
