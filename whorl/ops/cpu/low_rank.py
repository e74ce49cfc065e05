"""Low-rank updates on CPUs, by the products of `linear`: a served adapter has the bits of a trained one."""

from collections.abc import Sequence

from torch import Tensor

from ..low_rank_update import updated
from .linear import multiply


def low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    groups: Tensor,
    ranks: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    return updated(multiply, y, x, a, b, groups, ranks, scales, sizes, bias)
