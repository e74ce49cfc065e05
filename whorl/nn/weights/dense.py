"""The plain format: every value in the model's dtype."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.nn.weight import FEW, Destination, Format, Formats, Matrix, Norm, Part
from whorl.ops.cpu import library as cpu_library
from whorl.ops.linear import pack


@dataclass(frozen=True, slots=True)
class Dense(Format):
    """Stores every value in the model's dtype."""

    has_weight = True

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        return {"weight": torch.empty(matrix.shape, dtype=matrix.dtype)}

    def destinations(self, matrix: Matrix, part: Part) -> Iterator[tuple[str, Destination]]:
        yield "weight", Destination(into=matrix.weight[part.place], shape=part.shape, index=(part.rows, part.columns))

    def values(self, matrix: Matrix) -> Tensor:
        return matrix.weight

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        matrix.weight.normal_(std=matrix.shape[-1] ** -0.5, generator=generator)

    def finish(self, matrix: Matrix) -> None:
        if len(matrix.shape) == 2 and cpu_library.missing() is not None:
            pack(matrix.weight)  # on a CPU: stores a copy in the order that its library reads fastest

    def linear(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear.unchecked(x, matrix.weight, bias)  # type: ignore[no-any-return]

    def norm_linear(
        self, matrix: Matrix, norm: Norm, x: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_fused = x.is_cuda and x.shape[0] <= FEW and residual is not None and bias is None
        if not is_fused or torch.is_grad_enabled():
            return Format.norm_linear(self, matrix, norm, x, residual, bias)
        return ops.norm_linear.unchecked(  # type: ignore[no-any-return]
            x, residual, norm.weight, matrix.weight, norm.eps, plus_one=norm.plus_one
        )

    def for_kernels(self, matrix: Matrix) -> Tensor:
        return matrix.weight

    def lookup(self, matrix: Matrix, row_ids: Tensor) -> Tensor:
        return nn.functional.embedding(row_ids, matrix.weight)


DENSE = Dense()
ALL_DENSE = Formats(of=lambda name: DENSE)
