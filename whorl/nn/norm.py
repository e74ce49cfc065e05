"""RMSNorm, with the residual that it adds."""

from collections.abc import Iterator

from torch import Tensor, nn

from whorl import ops

from .weight import ALL, Slot, parameter


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = parameter(size), eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        if residual is None:
            return ops.rms_norm.unchecked(x, self.weight, self.eps), x
        return ops.add_rms_norm.unchecked(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(into=self.weight, shape=tuple(self.weight.shape), index=(ALL,))
