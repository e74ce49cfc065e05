"""Grouped matmul of a mixture of experts in training: rows sorted by expert, each group times its expert's weight."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.device import compute_capability

from .._draw import Draw
from .._hopper import HOPPER
from .._op import Values, narrow, operator, widen
from .._tracing import is_readable
from ..linear import multiply
from . import grouped_matmul_torch_npu


def _check_counts(x: Tensor, counts: Tensor, **arguments: object) -> None:
    if is_readable(counts) and int(counts.sum()) != x.shape[0]:
        name = "grouped_matmul_backward" if "dy" in arguments else "grouped_matmul"
        raise ValueError(f"{name}: counts are {counts.tolist()}, expected a sum of {x.shape[0]} rows")


_X = Annotated[Tensor, "[M, C] float"]
_WEIGHT = Annotated[Tensor, "[E>0, F, C] x; pass a weight stored as [E, C, F] as weight.transpose(1, 2)"]
_COUNTS = Annotated[Tensor, "[E] int, from 0"]


@operator(check=_check_counts, flops="2*M*F*C")
def grouped_matmul(x: _X, weight: _WEIGHT, counts: _COUNTS) -> Annotated[Tensor, "[M, F] x"]:
    """Multiply each row by its expert's weight: y[m] = weight[e] @ x[m], where e is the expert of row m.

    The first counts[0] rows are expert 0's, the next counts[1] expert 1's, and so on. weight: as nn.Linear and Hugging
    Face's experts store it, any strides (one stored as [E, C, F], as torch's grouped_mm expects it, is passed as
    weight.transpose(1, 2)). The counts sum to M, which is checked on the CPU. Returns y contiguous. Sums in fp32,
    rounded once; on a CPU a row's bits do not depend on the other rows, as in `linear`. Differentiable in x and weight.

        y = ops.grouped_matmul(rows, weight, counts)  # rows and counts from permute
    """
    parts = x.split(counts.tolist())
    products = [multiply(widen(part).contiguous(), widen(w)) for part, w in zip(parts, weight, strict=True)]
    return narrow(torch.cat(products), x.dtype).contiguous()


@operator(check=_check_counts, flops="4*M*F*C")
def grouped_matmul_backward(
    dy: Annotated[Tensor, "[M, F] x"], x: _X, weight: _WEIGHT, counts: _COUNTS
) -> tuple[Annotated[Tensor, "[M, C] x"], Annotated[Tensor, "[E, F, C] x"]]:
    """Gradients of `grouped_matmul`: dx[m] = dy[m] @ weight[e] and dweight[e] = sum over its rows of dy[m] x[m]^T.

    Both are contiguous; the gradient of an expert without rows is zero. Sums are in fp32, rounded once.
    """
    sizes = counts.tolist()
    grads, rows = dy.split(sizes), x.split(sizes)
    dx = torch.cat([widen(g) @ widen(w) for g, w in zip(grads, weight, strict=True)])
    dweight = torch.stack([widen(g).transpose(0, 1) @ widen(r) for g, r in zip(grads, rows, strict=True)])
    return narrow(dx, x.dtype).contiguous(), narrow(dweight, weight.dtype).contiguous()


@grouped_matmul.gradient(save=("x", "weight", "counts"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dx, dweight = grouped_matmul_backward(grads[0], args["x"], args["weight"], args["counts"], backend=args["backend"])
    return {"x": dx, "weight": dweight}


# The backend torch_cuda is torch.nn.functional.grouped_mm. It cannot be the reference, because it accepts only what its
# kernel supports. Where it accepts a call it is preferred, except where `_torch_slower` gives a reason.


def _torch_reason(x: Tensor, weight: Tensor, **_: object) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return "torch.nn.functional.grouped_mm needs torch 2.10 or later"
    if compute_capability(x.device) != HOPPER:
        return "torch's grouped_mm has a kernel on Hopper only"
    if x.dtype != torch.bfloat16:
        return f"torch's grouped_mm takes bf16, got {x.dtype}"
    if weight.shape[1] % 8 or weight.shape[2] % 8:
        return f"torch's grouped_mm takes sizes that are multiples of 8, got {list(weight.shape[1:])}"
    return None if x.shape[0] else "no rows"


# The faster forward on an H200 by rows per expert, for 4096 rows from 7168 to 2048 channels: Triton takes 455 us and
# torch 582 us at 64 rows, 196 us and 166 us at 512 (bench/results/moe_h200.md). torch's gradients are faster at both.
FASTER = {64: "triton", 512: "torch_cuda"}


def _torch_slower(x: Tensor, weight: Tensor, **_: object) -> str | None:
    rows = max(1.0, x.shape[0] / max(1, weight.shape[0]))
    nearest = min(FASTER, key=lambda measured: abs(math.log(measured / rows)))
    if FASTER[nearest] == "torch_cuda":
        return None
    return f"the Triton kernel is faster at about {nearest} rows per expert, got {rows:.0f}"


def _aligned(x: Tensor) -> Tensor:
    """Return x if the kernel can read it, else a contiguous copy.

    The kernel needs one of the last two strides to be 1, and the other strides and the address aligned to 16 bytes.
    """
    is_fit = 1 in x.stride()[-2:] and all(s % 8 == 0 for s in x.stride() if s != 1) and x.data_ptr() % 16 == 0
    return x if is_fit else x.clone(memory_format=torch.contiguous_format)


@grouped_matmul.impl("torch_cuda", accepts=_torch_reason, slower=_torch_slower)
def _(x, weight, counts):  # type: ignore[no-untyped-def]
    ends = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(_aligned(x), _aligned(weight).transpose(1, 2), offs=ends)


@grouped_matmul_backward.impl("torch_cuda", accepts=_torch_reason)
def _(dy, x, weight, counts):  # type: ignore[no-untyped-def]
    ends = counts.cumsum(0, dtype=torch.int32)
    dy = _aligned(dy)
    return F.grouped_mm(dy, _aligned(weight), offs=ends), F.grouped_mm(dy.t(), _aligned(x), offs=ends)


grouped_matmul.impl("cpp", "whorl.ops.cpu.moe:grouped_matmul")
grouped_matmul_backward.impl("cpp", takes_fp64=False)(grouped_matmul_backward.reference)
grouped_matmul.impl("triton", "grouped_matmul_triton:forward")
grouped_matmul_backward.impl("triton", "grouped_matmul_triton:backward")
grouped_matmul.impl("torch_npu", "grouped_matmul_torch_npu:forward", accepts=grouped_matmul_torch_npu.reason)
grouped_matmul_backward.impl(
    "torch_npu", "grouped_matmul_torch_npu:backward", accepts=grouped_matmul_torch_npu.backward_reason
)


_CASES: list[Values] = [
    {"tokens": (1,), "size": (4, 8), "counts": (1,)},
    {"tokens": (7,), "size": (24, 40), "counts": (3, 0, 4)},
    {"tokens": (9,), "size": (20, 33), "counts": (0, 5, 4, 0), "scale": 0.01},
    {"tokens": (0,), "size": (16, 8), "counts": (0, 0)},
    {"tokens": (18,), "size": (40, 70), "counts": (17, 1)},
    {"tokens": (37,), "size": (40, 24), "counts": (19, 1, 17), "sliced": True},
    {"tokens": (20,), "size": (17, 70), "counts": (0, 0, 20), "swapped": True},  # strides of torch's grouped_mm
]
_DEEPSEEK = {"tokens": (4096,), "size": (2048, 7168)}
_BENCH: list[Values] = [
    {**_DEEPSEEK, "counts": (512,) * 8},
    {**_DEEPSEEK, "counts": (64,) * 64},
    {"tokens": (4096,), "size": (7168, 2048), "counts": (512,) * 8, "swapped": True},
]


def _make(draw: Draw, counts: tuple[int, ...], swapped: bool = False) -> Values:
    def swapped_weight(experts: int, width: int, channels: int) -> Tensor:
        scaled = torch.randn(experts, channels, width + draw.gap, **draw.kind) / channels**0.5
        return scaled.transpose(1, 2)[:, :width]

    weight = {"weight": swapped_weight} if swapped else {}
    return {"counts": torch.tensor(counts, dtype=torch.int32, device=draw.device), **weight}


for _op in (grouped_matmul, grouped_matmul_backward):
    _op.inputs(cases=_CASES, bench=_BENCH, words={"tokens": "M", "size": "F, C"})(_make)
