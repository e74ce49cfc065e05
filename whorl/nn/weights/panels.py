"""GGUF weights on a CPU with whorl's own kernels: multiplied in the file's bits, by tokens rounded to 16 bits.

`whorl/ops/cpu/packed.py` has the arithmetic. Products are not those of the unpacked values, because tokens are rounded,
too. A matrix of plain numbers, such as a router's, is multiplied as it is; one with a type or a size that has no kernel
stays in its blocks.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whorl.nn.weight import Norm, Part
from whorl.ops.cpu import norm as cpu_norm
from whorl.ops.cpu.linear import linear
from whorl.ops.cpu.moe import run_experts
from whorl.ops.cpu.packed import KINDS, PackedMatrix, PackedStack, columns_per_block, interleave, trim

from .gguf import GgufBlocks
from .quantised import Pick

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufPanels(GgufBlocks):
    """Weights in GGUF's types, with rows interleaved for the kernels.

    The parameters of a matrix are panels<e>_<n>, uint8 [bytes], of part n of matrix e of a stack, or of matrix 0; the
    attribute `products` has a `PackedMatrix` for each matrix. One of plain numbers has the parameter `weight` instead.
    token_bits: what tokens are rounded to.
    """

    token_bits: Literal[8, 16] = 16
    is_weight_only = False  # tokens are rounded, too

    def finish(self, matrix: Any) -> None:
        parts = matrix.entry_parts
        columns = matrix.shape[-1]
        kinds = [self.kinds[part.source(matrix.name)] for part in parts]
        if sum(_rows(part) for part in parts) != matrix.shape[-2]:  # rows that pad the last rank's share
            return
        stacks = [getattr(matrix, f"blocks{number}").data for number in range(len(parts))]
        if kinds[0] in PLAIN and len(set(kinds)) == 1:
            weight = torch.cat(stacks, -2).view(PLAIN[kinds[0]])
            matrix.replace(weight=self.tiles.as_checkpoint(weight) if self.tiles.has(matrix) else weight)
            return
        if not all(kind in KINDS and columns % columns_per_block(kind) == 0 for kind in kinds):
            return
        stacks = [stack.view(-1, *stack.shape[-2:]) for stack in stacks]
        entries = [
            [interleave(kind, stack[e], columns) for kind, stack in zip(kinds, stacks, strict=True)]
            for e in range(len(stacks[0]))
        ]
        matrix.replace(
            **{f"panels{e}_{n}": part.panels for e, entry in enumerate(entries) for n, part in enumerate(entry)}
        )
        matrix.products = [PackedMatrix(entry, columns, self.token_bits) for entry in entries]
        if matrix.lead:
            matrix.stack = PackedStack(matrix.products)
        del stacks
        trim()

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        if isinstance(weight := self.for_kernels(matrix), Tensor):
            return weight[pick].to(matrix.dtype)
        products = getattr(matrix, "products", None)
        if products is None:
            return GgufBlocks.values_of(self, matrix, pick)
        if self.tiles.has(matrix):
            return self.tiles.as_checkpoint(self._of_panels(matrix, products, pick))
        return self._of_panels(matrix, products, pick)

    def _of_panels(self, matrix: Any, products: list[PackedMatrix], pick: Pick) -> Tensor:
        if matrix.lead:
            chosen = range(len(products))[pick] if isinstance(pick, slice) else pick.tolist()
            return torch.stack([products[e].values() for e in chosen]).to(matrix.dtype)
        if pick == slice(None) if isinstance(pick, slice) else False:
            return products[0].values().to(matrix.dtype)
        rows = torch.arange(matrix.shape[0])[pick] if isinstance(pick, slice) else pick
        return products[0].values(rows).to(matrix.dtype)

    def for_kernels(self, matrix: Any) -> Tensor | PackedMatrix | PackedStack | None:
        if (weight := getattr(matrix, "weight", None)) is not None:
            return weight  # type: ignore[no-any-return]
        products: list[PackedMatrix] | None = getattr(matrix, "products", None)
        if products is None or self.tiles.has(matrix):
            return None
        return matrix.stack if matrix.lead else products[0]  # type: ignore[no-any-return]

    def linear(self, matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.for_kernels(matrix)
        if weight is None and (products := getattr(matrix, "products", None)) is not None:
            return products[0].linear(self.tiles.as_file(x), bias)  # type: ignore[no-any-return]
        if weight is None:
            return GgufBlocks.linear(self, matrix, x, bias)
        return linear(x, weight, bias) if isinstance(weight, Tensor) else weight.linear(x, bias)  # type: ignore[union-attr]

    def norm_linear(
        self, matrix: Any, norm: Norm, x: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        products: list[PackedMatrix] | None = getattr(matrix, "products", None)
        described = None if products is None or x.dtype != torch.float32 else cpu_norm.described(norm, x, residual)
        is_plain = bias is None or bias.dtype == torch.float32
        if products is None or described is None or not is_plain or self.tiles.has(matrix):
            return GgufBlocks.norm_linear(self, matrix, norm, x, residual, bias)
        return products[0].norm_linear(x, residual, described, bias)

    def experts(self, gate_up: Any, down: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        first, second = (self.for_kernels(matrix) for matrix in (gate_up, down))
        if first is None or second is None:
            return GgufBlocks.experts(self, gate_up, down, x, weights, ids)
        return run_experts(first, second, x, weights, ids)  # type: ignore[arg-type]


def _rows(part: Part) -> int:
    return part.rows.stop - part.rows.start
