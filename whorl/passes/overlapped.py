"""Operators that overlap matmuls with collectives: one rank's rows are sent while the next rank's are computed."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import custom_op

from whorl import collectives
from whorl.ops import linear

from . import fused


def _width(weight: Tensor, product: str) -> Any:
    return weight.shape[1 if product == "mm" else 0]


def _matmul(weight: Tensor, product: str) -> tuple[collectives.Multiply, int]:
    """Return the product with the weight as a function, and its number of output channels.

    product: "mm", aten.mm with weight [K, N], or "linear", whorl's with weight [N, K].
    """
    multiply = (lambda rows: rows @ weight) if product == "mm" else (lambda rows: linear(rows, weight))
    return multiply, _width(weight, product)


@custom_op("whorl::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    """Return this rank's ceil(T / p) rows of the sum over ranks of x [T, K] @ weight; rows past T are zero.

    product: "mm" with weight [K, N], or "linear", whorl's with weight [N, K]. ordered: add in rank order, which no
    platform's own fused operator does.
    """
    if not ordered and product == "mm" and (run := fused.reduce_scatter(x, weight, group)) is not None:
        return run()
    return collectives.overlapped_reduce_scatter(x, *_matmul(weight, product), group)


@matmul_reduce_scatter.register_fake
def _(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    count = collectives.rows_per_rank(x.shape[0], collectives.group_size(group))
    return x.new_empty(count, _width(weight, product))


@custom_op("whorl::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], tokens: int, group: str, format: str = "", product: str = "mm"
) -> list[Tensor]:
    """Gather the rows [tokens, K] from every rank's x [ceil(tokens / p), K] and multiply them by each weight.

    Returns the gathered rows, then the result for each weight. format: "int8" or "fp8" sends rows in that format with
    one scale per row, as `all_gather_quantized` does. product: as in `matmul_reduce_scatter`.
    """
    if not format and product == "mm" and (run := fused.all_gather(x, weights, tokens, group)) is not None:
        return run()
    return collectives.overlapped_all_gather(x, [_matmul(w, product) for w in weights], tokens, group, format)


@all_gather_matmul.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], tokens: int, group: str, format: str = "", product: str = "mm"
) -> list[Tensor]:
    return [x.new_empty(tokens, x.shape[1]), *(x.new_empty(tokens, _width(w, product)) for w in weights)]


@custom_op("whorl::matmul_all_reduce", mutates_args=())
def matmul_all_reduce(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    """Return the sum over ranks of x [T, K] @ weight; arguments as in `matmul_reduce_scatter`."""
    if not ordered and product == "mm" and (run := fused.all_reduce(x, weight, group)) is not None:
        return run()
    own_rows = collectives.overlapped_reduce_scatter(x, *_matmul(weight, product), group)
    return collectives._all_gather(own_rows, x.shape[0], group)


@matmul_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    return x.new_empty(x.shape[0], _width(weight, product))
