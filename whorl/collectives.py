"""Collectives as functional custom operators, so that torch.compile can put them into graphs.

Tensors are sharded along their first dimension, whose entries are called rows. Of T rows over p ranks each rank has
ceil(T / p); the last ranks are padded with zero rows, so any T works, including 0. The rank is read when an operator
runs and is never a constant of a graph: the compiled graph is the same on every rank. Sums are in rank order and in
fp32, rounded once: the bits of a row depend on that row alone, and reduce_scatter gives the same bits as all_reduce.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

SCALE_BYTES = 4  # of the fp32 scale sent with each quantised row
LARGEST = 127  # code of int8
MIN_QUANTIZED = 64  # features; in a shorter row the scale and the extra message cost more than 8 bits save


def process_group(group: Any) -> Any:
    """Return the process group with this name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)


def group_size(group: str) -> int:
    """Return the number of ranks of the group with this name."""
    return int(process_group(group).size())


def group_name(group: Any) -> str:
    """Return the name by which graphs refer to a process group; None is the group of all ranks.

    Raises RuntimeError when torch.distributed is not initialised.
    """
    if isinstance(group, str):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "sequence parallelism needs a process group: call torch.distributed.init_process_group first"
        )
    resolved: Any = group or dist.group.WORLD
    return str(resolved.group_name)


# Dynamo treats the result as a constant. torch.compiler.assume_constant_result sets this attribute too, but calling it
# would import the compiler.
group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rows_per_rank(tokens: Any, size: int) -> Any:
    """Return ceil(tokens / size), for integers and for symbolic sizes."""
    return (tokens + size - 1) // size


def _padded(x: Tensor, size: int) -> Tensor:
    """Return x padded with zero rows to a multiple of size, contiguous."""
    missing = -x.shape[0] % size
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def sum_in_rank_order(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of parts [p, rows, ...] over ranks, first rank first; 16-bit parts are summed in fp32."""
    first, *later = parts.float() if parts.dtype in (torch.bfloat16, torch.float16) else parts
    total = first.clone()
    for part in later:
        total += part
    return total.to(dtype)


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Exchange x [T, ...] by an all-to-all and sum this rank's ceil(T / p) rows in rank order."""
    ranks = process_group(group)
    sent = _padded(x, ranks.size())
    parts = torch.empty_like(sent)
    if sent.numel():
        dist.all_to_all_single(parts, sent, group=ranks)
    return sum_in_rank_order(parts.unflatten(0, (ranks.size(), sent.shape[0] // ranks.size())), x.dtype)


def _all_gather(x: Tensor, tokens: int, group: str) -> Tensor:
    ranks = process_group(group)
    if x.shape[0] != rows_per_rank(tokens, ranks.size()):
        raise RuntimeError(
            f"all_gather: x has {x.shape[0]} rows on this rank, expected "
            f"{rows_per_rank(tokens, ranks.size())} for {tokens} tokens over {ranks.size()} ranks"
        )
    out = gather_rows(x, ranks.size(), ranks)
    return out[:tokens].clone() if tokens < out.shape[0] else out


def gather_rows(x: Tensor, size: int, group: Any) -> Tensor:
    """Return the x [rows, ...] of all `size` ranks of a process group (None: of all processes), [size * rows, ...]."""
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    if out.numel():
        pair = out, x.contiguous()
        if x.element_size() == 1:  # gloo does not support fp8, so one-byte dtypes travel as uint8
            pair = pair[0].view(torch.uint8), pair[1].view(torch.uint8)
        # torch 2.13 renamed it and warns of the old name.
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(*pair, group=group)
    return out


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send the rows of x to the ranks of a process group, the first `sent[0]` to rank 0 and so on; return the rows that
    came, `received[0]` from rank 0 and so on."""
    out = x.new_empty(sum(received), *x.shape[1:])
    pair = (out.view(torch.uint8), x.contiguous().view(torch.uint8)) if x.shape[1:] else (out, x)
    dist.all_to_all_single(*pair, received, sent, group=group)
    return out


@custom_op("whorl::ordered_all_reduce", mutates_args=())
def ordered_all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum over ranks of x [T, ...], added in rank order: a reduce-scatter, then an all-gather."""
    return _all_gather(_reduce_scatter(x, group), x.shape[0], group)


@ordered_all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("whorl::ordered_reduce_scatter", mutates_args=())
def ordered_reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Return this rank's ceil(T / p) rows of the sum over ranks of x [T, ...]; rows past T are zero."""
    return _reduce_scatter(x, group)


@ordered_reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(rows_per_rank(x.shape[0], group_size(group)), *x.shape[1:])


@custom_op("whorl::all_gather", mutates_args=())
def all_gather(x: Tensor, tokens: int, group: str) -> Tensor:
    """Return [tokens, ...] gathered from every rank's x [ceil(tokens / p), ...], without the padding."""
    return _all_gather(x, tokens, group)


@all_gather.register_fake
def _(x: Tensor, tokens: int, group: str) -> Tensor:
    return x.new_empty(tokens, *x.shape[1:])


@custom_op("whorl::all_gather_quantized", mutates_args=())
def all_gather_quantized(x: Tensor, tokens: int, group: str, format: str) -> Tensor:
    """Gather as `all_gather` does, but send each row as int8 or fp8 followed by its fp32 scale. This rounds.

    format "codes": as int8, restored in fp32 to numbers that `dynamic_quant` gives the same codes and scales as x: a
    product that quantises its rows then has the bits that it has for x.
    """
    packed, restore = _pack(x.flatten(1), format)
    return restore(_all_gather(packed, tokens, group)).view(tokens, *x.shape[1:])


@all_gather_quantized.register_fake
def _(x: Tensor, tokens: int, group: str, format: str) -> Tensor:
    return x.new_empty(tokens, *x.shape[1:], dtype=torch.float32 if format == "codes" else x.dtype)


@custom_op("whorl::local_rows", mutates_args=())
def local_rows(x: Tensor, group: str) -> Tensor:
    """Return this rank's ceil(T / p) rows of the replicated x [T, ...]; rows past T are zero."""
    ranks = process_group(group)
    count = rows_per_rank(x.shape[0], ranks.size())
    local = x[ranks.rank() * count : (ranks.rank() + 1) * count]
    if local.shape[0] == count:
        return local.clone(memory_format=torch.contiguous_format)
    return torch.cat([local, x.new_zeros(count - local.shape[0], *x.shape[1:])])


@local_rows.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(rows_per_rank(x.shape[0], group_size(group)), *x.shape[1:])


@custom_op("whorl::zero_padding", mutates_args=())
def zero_padding(x: Tensor, tokens: int, group: str) -> Tensor:
    """Return a copy of this rank's x [ceil(tokens / p), ...] with zeros in the rows past the last token."""
    ranks = process_group(group)
    num_valid = max(0, tokens - ranks.rank() * x.shape[0])
    out = x.clone(memory_format=torch.contiguous_format)
    out[num_valid:] = 0
    return out


@zero_padding.register_fake
def _(x: Tensor, tokens: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


def wire_bytes(collective: str, row_bytes: int, tokens: int, size: int) -> int:
    """Return the bytes that one rank sends in an all_reduce, reduce_scatter or all_gather of rows of row_bytes."""
    once = (size - 1) * rows_per_rank(tokens, size) * row_bytes
    return int(2 * once if collective == "all_reduce" else once)


# ---- overlapped with matmuls: one rank's rows are sent while the next rank's are multiplied

Multiply = Callable[[Tensor], Tensor]  # a matmul [T, K] -> [T, N] whose rows do not depend on the rows beside them


def overlapped_reduce_scatter(x: Tensor, multiply: Multiply, width: int, group: str) -> Tensor:
    """Return this rank's ceil(T / p) rows of the sum over ranks of multiply(x), [T, width]; rows past T are zero.

    The rows of one rank after the other are multiplied, and each part is sent to its rank.
    """
    ranks = process_group(group)
    size, own_rank = ranks.size(), ranks.rank()
    count = rows_per_rank(x.shape[0], size)
    parts = x.new_zeros(size, count, width)
    in_flight, works = [], []  # parts must stay alive until they are sent
    for step in range(1, size + 1):  # this rank's rows last: they are multiplied while the others are sent
        to, source = (own_rank + step) % size, (own_rank - step) % size
        rows = x[min(to * count, x.shape[0]) : (to + 1) * count]
        part = parts[own_rank] if to == own_rank else x.new_zeros(parts.shape[1:])
        part[: rows.shape[0]] = multiply(rows)
        if to != own_rank:
            works += _exchange(part, to, parts[source], source, ranks)
            in_flight.append(part)
    for work in works:
        work.wait()
    return sum_in_rank_order(parts, x.dtype)


def overlapped_all_gather(
    x: Tensor, multiplies: Sequence[tuple[Multiply, int]], tokens: int, group: str, format: str = ""
) -> list[Tensor]:
    """Return the rows [tokens, K] gathered from every rank's x, then each matmul of them.

    multiplies: the matmuls, each with its number of output channels. format: as in `all_gather_quantized`; "": exact.
    """
    ranks = process_group(group)
    size, own_rank = ranks.size(), ranks.rank()
    packed, restore = _pack(x, format)
    arrived = [packed if rank == own_rank else torch.empty_like(packed) for rank in range(size)]
    works = {}
    for step in range(1, size):
        to, source = (own_rank + step) % size, (own_rank - step) % size
        works[source] = _exchange(packed, to, arrived[source], source, ranks)
    gathered = x.new_empty(size * x.shape[0], x.shape[1])
    outs = [x.new_empty(tokens, width) for _, width in multiplies]
    for source in [(own_rank - step) % size for step in range(size)]:
        for work in works.get(source, ()):
            work.wait()
        first = source * x.shape[0]
        rows = restore(arrived[source])[: max(0, min(x.shape[0], tokens - first))]
        gathered[first : first + rows.shape[0]] = rows
        for out, (multiply, _) in zip(outs, multiplies, strict=True):
            out[first : first + rows.shape[0]] = multiply(rows)
    return [gathered[:tokens].contiguous(), *outs]


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


def _pack(x: Tensor, format: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tensor to send in place of x, and the function that restores rows of x from it."""
    if not format:
        return x.contiguous(), lambda rows: rows
    from whorl.ops.quant import dequantize, dynamic_quant

    is_exact = format == "codes"
    codes, scale = dynamic_quant(x, format="int8" if is_exact else format)
    if is_exact:  # the scale follows from the largest magnitude, but not the other way round
        scale = x.abs().amax(1).float()
    width, code_dtype = codes.shape[1], codes.dtype
    packed = torch.cat([codes.view(torch.uint8), scale.view(-1, 1).view(torch.uint8)], 1)

    def restore(rows: Tensor) -> Tensor:
        scale, codes = rows[:, width:].contiguous().view(torch.float32), rows[:, :width].contiguous().view(code_dtype)
        if not is_exact:
            return dequantize(codes, scale.view(-1), x.dtype)
        values = dequantize(codes, scale.view(-1) / scale.new_full((1,), LARGEST), torch.float32)
        return torch.where(codes.abs() == LARGEST, scale.copysign(values), values)

    return packed, restore
