"""Products and collectives that run piece by piece at the same time, as operators."""

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
    """product: "mm", aten.mm with weight [K, N], or "linear", whorl's with weight [N, K]."""
    return x @ weight if product == "mm" else linear(x, weight)


def _width(weight: Tensor, product: str) -> Any:
    return weight.shape[1 if product == "mm" else 0]


def _rows_of(x: Tensor, rank: int, count: int) -> Tensor:
    """Rank's rows of x; fewer, or none, where x ends."""
    return x[min(rank * count, x.shape[0]) : (rank + 1) * count]


def _exchange(sent: Tensor, to: int, received: Tensor, source: int, ranks: Any) -> list[Any]:
    """Start sending to one rank of the group and receiving from another."""
    if not sent.numel():
        return []
    # As bytes: gloo does not know every dtype.
    pairs = ((dist.isend, sent, to), (dist.irecv, received, source))
    works = [dist.P2POp(way, x.view(torch.uint8), dist.get_global_rank(ranks, rank), ranks) for way, x, rank in pairs]
    return list(dist.batch_isend_irecv(works))


def _overlapped_reduce_scatter(x: Tensor, weight: Tensor, group: str, product: str) -> Tensor:
    ranks = collectives.process_group(group)
    size, me = ranks.size(), ranks.rank()
    count = collectives.rows_per_rank(x.shape[0], size)
    parts = x.new_zeros(size, count, _width(weight, product))
    kept, works = [], []
    for step in range(1, size + 1):  # one's own rows last: they are multiplied while the others travel
        to, source = (me + step) % size, (me - step) % size
        rows = _rows_of(x, to, count)
        part = parts[me] if to == me else x.new_zeros(parts.shape[1:])
        part[: rows.shape[0]] = _multiply(rows, weight, product)
        if to != me:
            works += _exchange(part, to, parts[source], source, ranks)
            kept.append(part)
    for work in works:
        work.wait()
    return collectives._sum_in_rank_order(parts, x.dtype)


def _packed(x: Tensor, format: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What travels instead of x, and how rows are made of it again."""
    if not format:
        return x.contiguous(), lambda rows: rows
    codes, scale = dynamic_quant(x, format=format)
    width, kind = codes.shape[1], codes.dtype
    packed = torch.cat([codes.view(torch.uint8), scale.view(-1, 1).view(torch.uint8)], 1)

    def restore(rows: Tensor) -> Tensor:
        scale = rows[:, width:].contiguous().view(torch.float32)
        return dequantize(rows[:, :width].contiguous().view(kind), scale.view(-1), x.dtype)

    return packed, restore


def _overlapped_all_gather(
    x: Tensor, weights: Sequence[Tensor], tokens: int, group: str, format: str, product: str
) -> list[Tensor]:
    ranks = collectives.process_group(group)
    size, me = ranks.size(), ranks.rank()
    packed, restore = _packed(x, format)
    arrived = [packed if rank == me else torch.empty_like(packed) for rank in range(size)]
    works = {}
    for step in range(1, size):
        to, source = (me + step) % size, (me - step) % size
        works[source] = _exchange(packed, to, arrived[source], source, ranks)
    gathered = x.new_empty(size * x.shape[0], x.shape[1])
    outs = [x.new_empty(tokens, _width(w, product)) for w in weights]
    for source in [(me - step) % size for step in range(size)]:
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
    """This rank's ceil(T / p) rows of the sum over ranks of x [T, K] @ weight; rows past T are zero.

    product: "mm" with weight [K, N], or "linear", whorl's with weight [N, K]. ordered: add in
    rank order, which no platform's own fused operator does.
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
    """The rows [tokens, K] gathered from every rank's x [ceil(tokens / p), K], and their product with each weight.

    format: "int8" or "fp8": rows travel with that many bits and a scale each, as in `all_gather_quantized`.
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
    """The sum over ranks of x [T, K] @ weight; arguments as `matmul_reduce_scatter`."""
    if not ordered and product == "mm" and (run := fused.all_reduce(x, weight, group)) is not None:
        return run()
    return collectives._all_gather(_overlapped_reduce_scatter(x, weight, group, product), x.shape[0], group)


@matmul_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    return x.new_empty(x.shape[0], _width(weight, product))
