"""Collectives as functional operators that graphs can hold.

Rows are the first dim. T rows over p ranks: each rank has ceil(T / p) of them, the last ranks' filled up with zeros, so
that any T works, none included. The rank is read when an operator runs and never stands in a graph: a compiled graph
is the same on every rank. Sums are in rank order and in fp32, rounded once: a row's bits depend on that row alone, and
reduce_scatter gives the same bits as all_reduce.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

SCALE_BYTES = 4  # beside each quantised row


def process_group(group: Any) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)


def group_size(group: str) -> int:
    return int(process_group(group).size())


def group_name(group: Any) -> str:
    """The name under which graphs know a process group; None is the group of all processes."""
    if isinstance(group, str):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "sequence parallelism needs a process group: call torch.distributed.init_process_group first"
        )
    found: Any = group or dist.group.WORLD
    return str(found.group_name)


# A constant of every graph. What torch.compiler.assume_constant_result sets; calling it would import the compiler.
group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rows_per_rank(tokens: Any, size: int) -> Any:
    """ceil(tokens / size), for counts and symbols alike."""
    return (tokens + size - 1) // size


def _padded(x: Tensor, size: int) -> Tensor:
    """x with zero rows up to a multiple of size, contiguous."""
    missing = -x.shape[0] % size
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _sum_in_rank_order(parts: Tensor, dtype: torch.dtype) -> Tensor:
    first, *others = parts.float() if parts.dtype in (torch.bfloat16, torch.float16) else parts
    total = first.clone()
    for other in others:
        total += other
    return total.to(dtype)


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    ranks = process_group(group)
    sent = _padded(x, ranks.size())
    parts = torch.empty_like(sent)
    if sent.numel():
        dist.all_to_all_single(parts, sent, group=ranks)
    return _sum_in_rank_order(parts.unflatten(0, (ranks.size(), sent.shape[0] // ranks.size())), x.dtype)


def _all_gather(x: Tensor, tokens: int, group: str) -> Tensor:
    ranks = process_group(group)
    if x.shape[0] != rows_per_rank(tokens, ranks.size()):
        raise RuntimeError(
            f"all_gather: {x.shape[0]} rows on this rank do not make {tokens} tokens over {ranks.size()} ranks"
        )
    out = x.new_empty(ranks.size() * x.shape[0], *x.shape[1:])
    if out.numel():  # gloo has no fp8; bytes are bytes
        as_bytes = torch.uint8 if x.element_size() == 1 else x.dtype
        # all_gather_into_tensor goes by this name from torch 2.13 on
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(out.view(as_bytes), x.contiguous().view(as_bytes), group=ranks)
    return out[:tokens].clone() if tokens < out.shape[0] else out


@custom_op("whorl::ordered_all_reduce", mutates_args=())
def ordered_all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's x [T, ...], in rank order: each rank adds up its rows and hands them round."""
    return _all_gather(_reduce_scatter(x, group), x.shape[0], group)


@ordered_all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("whorl::ordered_reduce_scatter", mutates_args=())
def ordered_reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's ceil(T / p) rows of the sum of every rank's x [T, ...]; rows past T are zero."""
    return _reduce_scatter(x, group)


@ordered_reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(rows_per_rank(x.shape[0], group_size(group)), *x.shape[1:])


@custom_op("whorl::all_gather", mutates_args=())
def all_gather(x: Tensor, tokens: int, group: str) -> Tensor:
    """[tokens, ...] from every rank's x [ceil(tokens / p), ...]; filled-up rows are cut off."""
    return _all_gather(x, tokens, group)


@all_gather.register_fake
def _(x: Tensor, tokens: int, group: str) -> Tensor:
    return x.new_empty(tokens, *x.shape[1:])


@custom_op("whorl::all_gather_quantized", mutates_args=())
def all_gather_quantized(x: Tensor, tokens: int, group: str, format: str) -> Tensor:
    """As `all_gather`, but a row travels as int8 or fp8 with its fp32 scale behind it, in one message. Rounds."""
    from whorl.ops.quant import dequantize, dynamic_quant

    codes, scale = dynamic_quant(x.flatten(1), format=format)
    got = _all_gather(torch.cat([codes.view(torch.uint8), scale.view(-1, 1).view(torch.uint8)], 1), tokens, group)
    width = codes.shape[1]
    codes, scale = got[:, :width].contiguous().view(codes.dtype), got[:, width:].contiguous().view(torch.float32)
    return dequantize(codes, scale.view(-1), x.dtype).view(tokens, *x.shape[1:])


@all_gather_quantized.register_fake
def _(x: Tensor, tokens: int, group: str, format: str) -> Tensor:
    return x.new_empty(tokens, *x.shape[1:])


@custom_op("whorl::local_rows", mutates_args=())
def local_rows(x: Tensor, group: str) -> Tensor:
    """This rank's ceil(T / p) rows of x [T, ...], which every rank holds; rows past T are zero."""
    ranks = process_group(group)
    count = rows_per_rank(x.shape[0], ranks.size())
    mine = x[ranks.rank() * count : (ranks.rank() + 1) * count]
    if mine.shape[0] == count:
        return mine.clone(memory_format=torch.contiguous_format)
    return torch.cat([mine, x.new_zeros(count - mine.shape[0], *x.shape[1:])])


@local_rows.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(rows_per_rank(x.shape[0], group_size(group)), *x.shape[1:])


@custom_op("whorl::zero_padding", mutates_args=())
def zero_padding(x: Tensor, tokens: int, group: str) -> Tensor:
    """x [ceil(tokens / p), ...] with zeros in the rows past the last token."""
    ranks = process_group(group)
    left = max(0, tokens - ranks.rank() * x.shape[0])
    out = x.clone(memory_format=torch.contiguous_format)
    out[left:] = 0
    return out


@zero_padding.register_fake
def _(x: Tensor, tokens: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


def wire_bytes(what: str, row_bytes: int, tokens: int, size: int) -> int:
    """Bytes that one rank sends; `what` is all_reduce, reduce_scatter or all_gather, row_bytes what a row has of it."""
    once = (size - 1) * rows_per_rank(tokens, size) * row_bytes
    return int(2 * once if what == "all_reduce" else once)
