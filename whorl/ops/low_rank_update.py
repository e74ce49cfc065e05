"""Low-rank updates of rows, with the products that a backend's `linear` has."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._op import narrow, widen
from .linear import Product


def updated(
    product: Product,
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    groups: Tensor,
    ranks: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    bias: Tensor | None,
) -> Tensor:
    """Compute `low_rank` with the products that `linear` has."""
    out = y.clone(memory_format=torch.contiguous_format)
    for group in set(groups.tolist()) - {-1}:
        rows = (groups == group).nonzero().flatten()
        inputs, first = widen(x[rows]), 0
        for part, size in enumerate(sizes):
            columns, rank = slice(first, first + size), int(ranks[group, part])
            first += size
            if not rank:
                continue
            hidden = narrow(product(inputs, widen(a[group, part, :rank])), x.dtype)
            update = product(widen(hidden), widen(b[group, columns, :rank].contiguous()))
            if bias is not None:
                update = update + widen(bias[group, columns])
            update = narrow(update, x.dtype) * float(scales[group, part])
            out[rows, columns] = y[rows, columns] + update
    return out
