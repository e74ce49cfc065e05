"""The tensors that a case of an operator is made of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """What they have in common. scale: of small-valued cases; sliced: rows lie further apart than they are long."""

    dtype: torch.dtype
    device: str
    scale: float = 1.0
    sliced: bool = False

    @property
    def kind(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    @property
    def wide(self) -> torch.dtype:
        """Of what an operator takes in fp32 whatever the rest is; fp64 is the gold in tests."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def normal(self, *shape: int, scale: float = 1.0, gap: int = 8) -> Tensor:
        """Of a sliced case with `gap` numbers between a row and the next."""
        x = torch.randn(*shape[:-1], shape[-1] + gap * self.sliced, **self.kind)
        return (scale * x)[..., : shape[-1]]

    def scaled(self, *shape: int, gap: int = 8) -> Tensor:
        return self.normal(*shape, scale=self.scale, gap=gap)

    def weight(self, *shape: int) -> Tensor:
        """Of a layer: products with it are as large as what it is multiplied with."""
        x = torch.randn(*shape[:-1], shape[-1] + 8 * self.sliced, **self.kind)
        return (x / shape[-1] ** 0.5)[..., : shape[-1]]
