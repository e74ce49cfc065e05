"""Random tensors for the test and benchmark cases of operators."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """The settings that all tensors of a case share, and functions that draw them.

    scale: multiplies the values (below 1 in small-valued cases); sliced: tensors are slices of wider ones, so that the
    stride between rows is larger than a row.
    """

    dtype: torch.dtype
    device: str
    scale: float = 1.0
    sliced: bool = False

    @property
    def kind(self) -> dict[str, Any]:
        """The dtype and device as keywords of torch's constructors."""
        return {"dtype": self.dtype, "device": self.device}

    @property
    def wide(self) -> torch.dtype:
        """The dtype of arguments that an operator always takes in fp32; fp64 where a test computes in fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def normal(self, *shape: int, scale: float = 1.0, gap: int = 8) -> Tensor:
        """Draw normal random numbers times `scale`; in a sliced case with `gap` unused numbers between two rows."""
        x = torch.randn(*shape[:-1], shape[-1] + gap * self.sliced, **self.kind)
        return (scale * x)[..., : shape[-1]]

    def scaled(self, *shape: int, gap: int = 8) -> Tensor:
        """Draw normal random numbers times the scale of the case."""
        return self.normal(*shape, scale=self.scale, gap=gap)

    def weight(self, *shape: int) -> Tensor:
        """Draw a layer's weight [..., N, K], scaled so that x @ weight.T is about as large as x."""
        x = torch.randn(*shape[:-1], shape[-1] + 8 * self.sliced, **self.kind)
        return (x / shape[-1] ** 0.5)[..., : shape[-1]]
