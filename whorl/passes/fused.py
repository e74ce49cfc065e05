"""Operators of a matmul and a collective: fused by the platform itself, or overlapped (`whorl.collectives`).

The platform's calls are those of symmetric memory on CUDA and of torch_npu on Ascend. `reduce_scatter`, `all_gather`
and `all_reduce` return a function that makes such a call, or None where the platform cannot run it. None of these calls
sums in rank order. Groups and communicators are looked up when an operator runs.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from whorl import collectives
from whorl.contracts import all_gather_mm_limit, mm_all_reduce_limit, mm_reduce_scatter_limit
from whorl.device import BACKENDS
from whorl.ops import _torch_npu, linear
from whorl.ops._torch_npu import dtype_name

CUDA, NPU = BACKENDS["triton"].home, BACKENDS["torch_npu"].home


def reduce_scatter(x: Tensor, weight: Tensor, group: str) -> Callable[[], Tensor] | None:
    """Return the fused call of x [T, K] @ weight [K, N] and a reduce-scatter over the group, or None."""
    world = collectives.group_size(group)
    if _uses_symmetric_memory(x, group) and x.shape[0] and not x.shape[0] % world:
        return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), weight, "sum", 0, group)
    if x.device.type != NPU or _limit(mm_reduce_scatter_limit, x, weight, world) is not None:
        return None
    return lambda: npu_reduce_scatter(x, weight, communicator(group), world)


def all_gather(x: Tensor, weights: Sequence[Tensor], tokens: int, group: str) -> Callable[[], list[Tensor]] | None:
    """Return the fused call of an all-gather of x and the matmuls of the gathered rows with each weight, or None."""
    world = collectives.group_size(group)
    if tokens != world * x.shape[0] or not tokens:
        return None
    if _uses_symmetric_memory(x, group):
        return lambda: _symmetric_all_gather(x, weights, group)
    if x.device.type != NPU or any(_limit(all_gather_mm_limit, x, w, world) for w in weights):
        return None
    return lambda: npu_all_gather(x, weights, communicator(group), world)


def all_reduce(x: Tensor, weight: Tensor, group: str) -> Callable[[], Tensor] | None:
    """Return the fused call of x [T, K] @ weight [K, N] and an all-reduce over the group, or None."""
    if x.device.type != NPU or _limit(mm_all_reduce_limit, x, weight, collectives.group_size(group)) is not None:
        return None
    return lambda: npu_all_reduce(x, weight, communicator(group))


# ---- CUDA


def _uses_symmetric_memory(x: Tensor, group: str) -> bool:
    return x.device.type == CUDA and x.dtype in (torch.bfloat16, torch.float16) and has_symmetric_memory(group)


@functools.cache
def has_symmetric_memory(group: str) -> bool:
    """Return whether the ranks of a group can map each other's memory.

    This is tried once, by allocating the workspace that the fused calls use later.
    """
    # The backend's name is not "nccl" in a group with several backends, so the one of CUDA is looked up.
    if f"{CUDA}:nccl" not in dist.get_backend_config(collectives.process_group(group)):
        return False
    from torch.distributed import _symmetric_memory

    try:
        _symmetric_memory.get_symm_mem_workspace(group, min_size=1 << 20)  # type: ignore[arg-type]
    except RuntimeError as error:  # GPUs without peer access, or on several hosts
        message = f"async_tp: no symmetric memory between these ranks: {error}; the product is split by rank instead"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True


def _symmetric_all_gather(x: Tensor, weights: Sequence[Tensor], group: str) -> list[Tensor]:
    gathered, outs = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), list(weights), 0, group)
    return [gathered, *outs]


# ---- Ascend


def _limit(limit: Callable[..., str | None], x: Tensor, weight: Tensor, world: int) -> str | None:
    return limit(shape=x.shape, weight_shape=weight.shape, dtype=dtype_name(x), world=world)


def communicator(group: str) -> str:
    """Return HCCL's name of this rank's communicator in the group."""
    ranks = collectives.process_group(group)
    return str(ranks._get_backend(torch.device(NPU)).get_hccl_comm_name(ranks.rank()))


def npu_reduce_scatter(x: Tensor, weight: Tensor, hcom: str, world: int) -> Tensor:
    out: Tensor = _torch_npu.call(
        "npu_mm_reduce_scatter_base", input=x.contiguous(), x2=weight, hcom=hcom, world_size=world, reduce_op="sum"
    )
    return out


def npu_all_gather(x: Tensor, weights: Sequence[Tensor], hcom: str, world: int) -> list[Tensor]:
    """Gather the rows in the fused call with the first weight; the other matmuls read the gathered rows."""
    first, gathered = _torch_npu.call(
        "npu_all_gather_base_mm", input=x.contiguous(), x2=weights[0], hcom=hcom, world_size=world, gather_output=True
    )
    return [gathered, first, *(gathered @ weight for weight in weights[1:])]


def npu_all_reduce(x: Tensor, weight: Tensor, hcom: str) -> Tensor:
    out: Tensor = _torch_npu.call("npu_mm_all_reduce_base", x1=x.contiguous(), x2=weight, hcom=hcom, reduce_op="sum")
    return out


# ---- the operators


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
    if not ordered and product == "mm" and (run := reduce_scatter(x, weight, group)) is not None:
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
    if not format and product == "mm" and (run := all_gather(x, weights, tokens, group)) is not None:
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
    if not ordered and product == "mm" and (run := all_reduce(x, weight, group)) is not None:
        return run()
    own_rows = collectives.overlapped_reduce_scatter(x, *_matmul(weight, product), group)
    return collectives._all_gather(own_rows, x.shape[0], group)


@matmul_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, group: str, ordered: bool = True, product: str = "mm") -> Tensor:
    return x.new_empty(x.shape[0], _width(weight, product))
