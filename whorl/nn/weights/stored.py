"""Plain weights of 16 bits that stay so in memory, where those of the model's dtype, fp32, would not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn.weight import Destination, Formats, Matrix, Part
from whorl.ops.cpu.library import has_kernels
from whorl.ops.cpu.linear import linear

from .dense import DENSE
from .quantised import Pick, Quantised, names, one_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Stored(Quantised):
    """Stores values as the checkpoint has them, in 16 bits, and widens a tile at a time for products in fp32.

    Widening is exact, so the results are those of weights in fp32, bit for bit.
    """

    dtype: torch.dtype

    has_weight = True

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        return {"weight": torch.empty(matrix.shape, dtype=self.dtype)}

    def destinations(self, matrix: Matrix, part: Part) -> Iterator[tuple[str, Destination]]:
        return DENSE.destinations(matrix, part)

    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        return matrix.weight[pick].to(matrix.dtype)

    def for_kernels(self, matrix: Matrix) -> Tensor:
        return matrix.weight

    def linear(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if has_kernels(x):  # which widen the weight as they read it
            return linear(x, matrix.weight, bias)
        return Quantised.linear(self, matrix, x, bias)

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        DENSE.randomize(matrix, generator)


def settings(tensors: Mapping[str, tuple[int, torch.dtype | None]]) -> dict[str, Any] | None:
    """Return the `quantization_config` by which a plain checkpoint stays as it is stored; None if there is none.

    tensors: the number of dims and the dtype of each tensor, by its name in the checkpoint.
    """
    matrices = {name: dtype for name, (dims, dtype) in tensors.items() if dims > 1}
    for name, dtype in DTYPES.items():
        if dtype in matrices.values():
            others = [module for module, kind in matrices.items() if kind != dtype]
            # A tensor of another name holds several modules, whose names are not known here.
            is_known = all(module.endswith(".weight") for module in others)
            method = {"quant_method": "stored", "dtype": name, "others": [m.removesuffix(".weight") for m in others]}
            return method if is_known else None
    return None


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a checkpoint that stays as it is stored.

    settings: `dtype`, of most matrices; `others`, the names of the modules that the checkpoint has in another dtype,
    which are converted to the model's.
    """
    stored = Stored(DTYPES[one_of(settings, "dtype", tuple(DTYPES), None)])
    others = frozenset(names(settings, "others"))
    return Formats(of=lambda name: DENSE if name in others else stored)
