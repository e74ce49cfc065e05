"""Operators that overlap matmuls with collectives: one rank's rows are sent while the next rank's are computed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from whorl import collectives
from whorl.ops import dequantize, dynamic_quant, linear

from . import fused


def _multiply(x: Tensor, weight: Tensor, product: str) -> Tensor:
    """Multiply x by the weight; product: "mm", aten.mm with weight [K, N], or "linear", whorl's with weight [N, K]."""
    return x @ weight if product == "mm" else linear(x, weight)


def _width(weight: Tensor, product: str) -> Any:
    return weight.shape[1 if product == "mm" else 0]


def _rank_rows(x: Tensor, rank: int, count: int) -> Tensor:
    """Return the rows of x that belong to `rank`; fewer, or none, where x ends."""
    return x[min(rank * count, x.shape[0]) : (rank + 1) * count]


def _exchange(sent: Tensor, to: int, received: Tensor, source: int, ranks: Any) -> list[Any]:
    """Start sending to one rank of the group and receiving from another; returns the requests to wait for."""
    if not sent.numel():
        return []
    # Sent as bytes, because gloo does not know every dtype.
    pairs = ((dist.isend, sent, to), (dist.irecv, received, source))
    operations = [
        dist.P2POp(transfer, x.view(torch.uint8), dist.get_global_rank(ranks, rank), ranks)
        for transfer, x, rank in pairs
    ]
    return list(dist.batch_isend_irecv(operations))


def _overlapped_reduce_scatter(x: Tensor, weight: Tensor, group: str, product: str) -> Tensor:
    """Multiply the rows of one rank after the other and send each part to its rank; sum what arrived in rank order."""
    ranks = collectives.process_group(group)
    size, own_rank = ranks.size(), ranks.rank()
    count = collectives.rows_per_rank(x.shape[0], size)
    parts = x.new_zeros(size, count, _width(weight, product))
    in_flight, works = [], []  # parts must stay alive until they are sent
    for step in range(1, size + 1):  # this rank's rows last: they are multiplied while the others are sent
        to, source = (own_rank + step) % size, (own_rank - step) % size
        rows = _rank_rows(x, to, count)
        part = parts[own_rank] if to == own_rank else x.new_zeros(parts.shape[1:])
        part[: rows.shape[0]] = _multiply(rows, weight, product)
        if to != own_rank:
            works += _exchange(part, to, parts[source], source, ranks)
            in_flight.append(part)
    for work in works:
        work.wait()
    return collectives._sum_in_rank_order(parts, x.dtype)


def _pack(x: Tensor, format: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tensor to send in place of x, and the function that restores rows of x from it."""
    if not format:
        return x.contiguous(), lambda rows: rows
    codes, scale = dynamic_quant(x, format=format)
    width, code_dtype = codes.shape[1], codes.dtype
    packed = torch.cat([codes.view(torch.uint8), scale.view(-1, 1).view(torch.uint8)], 1)

    def restore(rows: Tensor) -> Tensor:
        scale = rows[:, width:].contiguous().view(torch.float32)
        return dequantize(rows[:, :width].contiguous().view(code_dtype), scale.view(-1), x.dtype)

    return packed, restore


def _overlapped_all_gather(
    x: Tensor, weights: Sequence[Tensor], tokens: int, group: str, format: str, product: str
) -> list[Tensor]:
    ranks = collectives.process_group(group)
    size, own_rank = ranks.size(), ranks.rank()
    packed, restore = _pack(x, format)
    arrived = [packed if rank == own_rank else torch.empty_like(packed) for rank in range(size)]
    works = {}
    for step in range(1, size):
        to, source = (own_rank + step) % size, (own_rank - step) % size
        works[source] = _exchange(packed, to, arrived[source], source, ranks)
    gathered = x.new_empty(size * x.shape[0], x.shape[1])
    outs = [x.new_empty(tokens, _width(w, product)) for w in weights]
    for source in [(own_rank - step) % size for step in range(size)]:
        for work in works.get(source, ()):
            work.wait()
        first = source * x.shape[0]
        rows = restore(arrived[source])[: max(0, min(x.shape[0], tokens - first))]
        gathered[first : first + rows.shape[0]] = rows
        for out, weight in zip(outs, weights, strict=True):
            out[first : first + rows.shape[0]] = _multiply(rows, weight, product)
    return [gathered[:tokens].contiguous(), *outs]


@custom_op("whorl::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    """Return this rank's ceil(T / p) rows of the sum over ranks of x [T, K] @ weight; rows past T are zero.

    product: "mm" with weight [K, N], or "linear", whorl's with weight [N, K]. ordered: add in rank order, which no
    platform's own fused operator does.
    """
    if not ordered and product == "mm" and (run := fused.reduce_scatter(x, weight, group)) is not None:
        return run()
    return _overlapped_reduce_scatter(x, weight, group, product)


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
    return _overlapped_all_gather(x, weights, tokens, group, format, product)


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
    return collectives._all_gather(_overlapped_reduce_scatter(x, weight, group, product), x.shape[0], group)


@matmul_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    return x.new_empty(x.shape[0], _width(weight, product))
