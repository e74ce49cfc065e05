"""Norms: RMSNorm, with the residual that it adds, and LayerNorm."""

import torch
from torch import Tensor, nn

from whorl import ops

from .weight import Plain


class RMSNorm(Plain):
    """RMSNorm with one weight per channel.

    plus_one: the norm is multiplied by 1 + weight, as Gemma does.
    """

    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__(weight=(size,))
        self.size, self.eps, self.plus_one = size, eps, plus_one

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual; residual None: norm(x) and x."""
        if residual is None:
            return ops.rms_norm.unchecked(x, self.weight, self.eps, plus_one=self.plus_one), x
        return ops.add_rms_norm.unchecked(x, residual, self.weight, self.eps, plus_one=self.plus_one)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1 - self.plus_one)


class LayerNorm(Plain):
    """LayerNorm with mean and variance in fp32, rounded once; weight and bias in the model's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(weight=(size,), bias=(size,))
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1)
        self.bias.fill_(0)
