"""Products with packed weights by unpacking them, with the products that a backend's `linear` has."""

from torch import Tensor

from .._op import narrow, widen
from ..linear import Product, multiply
from .layout import CHUNK, find, values


def multiply_in_chunks(x: Tensor, weight: Tensor, product: Product = multiply) -> Tensor:
    """Return x @ weight.T: each chunk of 1024 columns is summed from zero, and the sums of the chunks added in order.

    x: [T, K] and weight: [N, K], both in the dtype of accumulation; product: that of a chunk.
    """
    parts = zip(x.split(CHUNK, 1), weight.split(CHUNK, 1), strict=True)
    y = None
    for a, b in parts:
        part = product(a.contiguous(), b.contiguous())
        y = part if y is None else y + part
    assert y is not None
    return y


def unpacked_linear(
    product: Product,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows: int,
    columns: int,
    layout: str,
) -> Tensor:
    """Compute `packed_linear` with the products that `linear` has."""
    order = find(layout)
    numbers = order.unpack(codes, x.shape[1])
    weight = values(numbers, scales, zeros, x.dtype, block=(rows, columns), middle=order.middle)
    y = multiply_in_chunks(widen(x), widen(weight), product)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return narrow(y, x.dtype)
