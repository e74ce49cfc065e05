"""Products with packed weights on CPUs, by those of `linear`: up to 1024 columns a packed matrix has the bits of
the plain one."""

from torch import Tensor

from ..moe.routed import run_routed
from ..quantised.unpacked import unpacked_linear
from .glu import glu
from .linear import multiply


def packed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows: int = 1,
    columns: int = 0,
    layout: str = "bytes",
) -> Tensor:
    return unpacked_linear(multiply, x, codes, scales, zeros, bias, rows=rows, columns=columns, layout=layout)


def packed_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    *,
    rows: int = 1,
    columns: int = 0,
    layout: str = "bytes",
) -> Tensor:
    def product(x: Tensor, e: int, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        weight = codes[e], scales[e], None if zeros is None else zeros[e]
        return packed_linear(x, *weight, rows=rows, columns=columns, layout=layout)

    def run_expert(e: int, rows_of_expert: Tensor) -> Tensor:
        hidden = glu(product(rows_of_expert, e, gate_up, gate_up_scales, gate_up_zeros))
        return product(hidden, e, down, down_scales, down_zeros)

    return run_routed(x, weights, ids, run_expert)
