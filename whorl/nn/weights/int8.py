"""Int8 weights with a scale per row, and int8 activations with a scale per token.

A product is an exact sum of integers, so it has the same bits on every device and in every order:
y = (sum over k of q[t, k] * w[n, k]) * w_scale[n] * x_scale[t] + bias, in fp32 in this order, rounded once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whorl import ops
from whorl.nn.weight import Destination, Matrix, Part

from .laid_out import lay_out_bytes, narrow_for_npu, packing_of, values_of, warn_unpacked
from .quantised import ONE_EACH, SINGLE, Pick, Quantised

SPREAD = 127 / 3**0.5  # standard deviation of random codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(Quantised):
    """Int8 weights [N, K] with fp32 scales, [N] in memory; kind: the checkpoint has one per row or per projection."""

    kind: Literal["row", "matrix"]
    is_weight_only: bool  # True: activations stay in the model's dtype; False: int8 with a scale per token

    @property
    def multiplies_codes(self) -> bool:
        return not self.is_weight_only

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        count = matrix.shape[-2] if self.kind == "row" else self.part_starts(matrix, ONE_EACH)[1]
        return {
            "weight": torch.empty(matrix.shape, dtype=torch.int8),
            "scales": torch.empty(*matrix.lead, count, dtype=torch.float32),
        }

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        rows = self.rows_of(matrix, part)
        yield "weight", self.destination(matrix.weight, part, rows, self.columns_of(part), dtype=torch.int8)
        if self.kind == "row":
            yield "weight_scale", self.destination(matrix.scales.unsqueeze(-1), part, rows, SINGLE)
        else:
            yield "weight_scale", self.destination(matrix.scales, part, self.rows_of(matrix, part, ONE_EACH))

    def finish(self, matrix: Any) -> None:
        scales = matrix.scales.data
        self._lay_out(matrix, scales if self.kind == "row" else self.scales_by_row(matrix, scales))

    def _lay_out(self, matrix: Any, scales: Tensor) -> None:
        if self.is_weight_only:
            if (reason := lay_out_bytes(matrix, matrix.weight.data, scales.unsqueeze(-1))) is None:
                return
            warn_unpacked(matrix.weight.device, "int8 weights", reason)
        matrix.replace(weight=matrix.weight.data, scales=narrow_for_npu(matrix, scales))

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        if packing_of(matrix) is not None:
            return values_of(matrix, pick)
        return (matrix.weight[pick].float() * matrix.scales[pick].unsqueeze(-1)).to(matrix.dtype)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        matrix.weight.random_(-127, 128, generator=generator)
        matrix.scales.fill_(matrix.shape[-1] ** -0.5 / SPREAD)
        self.finish(matrix)

    def linear(self, matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_weight_only:
            return Quantised.linear(self, matrix, x, bias)
        return ops.int8_linear.unchecked(x, matrix.weight, matrix.scales, bias)  # type: ignore[no-any-return]

    def experts(self, gate_up: Any, down: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the output of the experts, rounded where `ops.experts` rounds.

        The input of the second product is quantised, too.
        """
        if self.is_weight_only:
            return Quantised.experts(self, gate_up, down, x, weights, ids)
        parameters = gate_up.weight, gate_up.scales, down.weight, down.scales
        return ops.int8_experts(x, *parameters, weights, ids)  # type: ignore[no-any-return]
