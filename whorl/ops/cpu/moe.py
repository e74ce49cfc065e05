"""Mixtures of experts on CPUs: the choices of a router, and all experts of a layer in one call."""

from ctypes import byref

import torch
from torch import Tensor

from ..moe.routed import run_routed
from .glu import glu
from .library import TYPES, Plain, Routing, Stack, address, library, plain, use_threads
from .linear import linear
from .packed import PackedStack


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        first, second = (w if w.stride(-1) == 1 else w.contiguous() for w in (gate_up, down))
        return run_experts(first, second, x, weights, ids)

    def run_expert(e: int, rows: Tensor) -> Tensor:  # what lies between the two products is rounded to 16 bits
        return linear(glu(linear(rows, gate_up[e])), down[e])

    return run_routed(x, weights, ids, run_expert)


def stack_of(matrices: Tensor | PackedStack) -> Stack:
    """Describe matrices [E, N, K], which the caller keeps. Raises ValueError for rows with gaps between numbers."""
    if isinstance(matrices, PackedStack):
        return matrices.stack
    if matrices.stride(-1) != 1 or matrices.dtype not in TYPES:
        raise ValueError(f"experts have strides {matrices.stride()} and dtype {matrices.dtype}, expected plain rows")
    first = Plain(matrices.data_ptr(), *matrices.shape[1:], matrices.stride(1), TYPES[matrices.dtype])
    return Stack(None, first, matrices.stride(0) * matrices.element_size(), matrices.shape[2])


def run_experts(
    gate_up: Tensor | PackedStack, down: Tensor | PackedStack, x: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """Return what `ops.experts` does, like x, with nothing rounded between the products."""
    wide, scales, ids = plain(x).contiguous(), plain(weights).contiguous(), ids.int().contiguous()
    count, stacks = len(gate_up), (stack_of(gate_up), stack_of(down))
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(f"experts from {int(ids.min())} to {int(ids.max())} of {count}")
    y = torch.empty(wide.shape)
    use_threads()
    library().whorl_cpu_experts(
        *(*map(byref, stacks), count, wide.data_ptr(), *ids.shape),
        *(scales.data_ptr(), ids.data_ptr(), y.data_ptr()),
    )
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def route(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    wide, bias = plain(logits).contiguous(), None if bias is None else plain(bias).contiguous()
    count, num_experts = wide.shape
    weights, ids = torch.empty(count, k), torch.empty(count, k, dtype=torch.int32)
    routing = Routing(address(bias), num_experts, k, scoring == "sigmoid", renormalize, scale)
    use_threads()
    library().whorl_cpu_route(wide.data_ptr(), count, byref(routing), weights.data_ptr(), ids.data_ptr())
    return weights, ids


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    products, start = [x.new_empty(0, weight.shape[1])], 0
    for matrix, count in zip(weight, counts.tolist(), strict=True):
        if count:
            products.append(linear(x[start : start + count], matrix))
        start += count
    return torch.cat(products)
