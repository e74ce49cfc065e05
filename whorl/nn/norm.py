"""Norms: RMSNorm, with the residual that it adds, and LayerNorm."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from whorl import ops

from .weight import Destination, Formats, Weighted


class RMSNorm(Weighted):
    """RMSNorm with one weight per channel, in the model's dtype whatever the format of matrices.

    plus_one: the norm is multiplied by 1 + weight, as Gemma does.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.size, self.eps, self.plus_one = size, eps, plus_one

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        self.register_parameter("weight", nn.Parameter(torch.empty(self.size, dtype=dtype), requires_grad=False))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual; residual None: norm(x) and x."""
        if residual is None:
            return ops.rms_norm.unchecked(x, self.weight, self.eps, plus_one=self.plus_one), x
        return ops.add_rms_norm.unchecked(x, residual, self.weight, self.eps, plus_one=self.plus_one)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        yield f"{name}.weight", Destination(into=self.weight, shape=(self.size,), index=(slice(0, self.size),))

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1 - self.plus_one)


class LayerNorm(Weighted):
    """LayerNorm with mean and variance in fp32, rounded once; weight and bias in the model's dtype."""

    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        for key in ("weight", "bias"):
            self.register_parameter(key, nn.Parameter(torch.empty(self.size, dtype=dtype), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for key in ("weight", "bias"):
            yield (
                f"{name}.{key}",
                Destination(into=getattr(self, key), shape=(self.size,), index=(slice(0, self.size),)),
            )

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1)
        self.bias.fill_(0)
