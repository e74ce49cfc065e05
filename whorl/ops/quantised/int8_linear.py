"""A linear layer with int8 weights and int8 activations: its integer sums are exact on every device."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator
from ..quant import dynamic_quant
from . import int8_torch_npu
from .layout import CHUNK
from .packed_linear import draw_weight


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product x @ weight.T, [T, N] int32, of int8 x [T, K] and weight [N, K].

    Chunks of 1024 columns are multiplied in fp32, where their sums are exact in any order: 1024 * 128 * 127 < 2^24.
    """
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for a, b in zip(x.split(CHUNK, 1), weight.split(CHUNK, 1), strict=True):
        total += (a.float() @ b.float().t()).to(torch.int32)
    return total


@operator(flops="2*T*N*K", forward_only=True)
def int8_linear(
    x: Annotated[Tensor, "[T, K>0] float"],
    codes: Annotated[Tensor, "[N, K] int8"],
    scales: Annotated[Tensor, "[N] float"],
    bias: Annotated[Tensor | None, "[N] x or fp32"] = None,
) -> Annotated[Tensor, "[T, N] x"]:
    """Linear layer in int8: y[t, n] = (sum over k of q[t, k] * codes[n, k]) * scales[n] * s[t] + bias[n].

    q and s are the codes and scales of `dynamic_quant` of x. Returns y contiguous. The sum is the exact integer; the
    scales and the bias are applied in fp32, in the order above, and y is rounded once. So the bits are the same on
    every device and in every batch. No gradient.

        y = ops.int8_linear(x, codes, scales)
    """
    q, token_scales = dynamic_quant.reference(x)
    wide = token_scales.dtype
    y = exact_product(q, codes).to(wide) * scales.to(wide) * token_scales.unsqueeze(-1)
    return narrow(y if bias is None else y + bias.to(wide), x.dtype)


int8_linear.impl("triton", "int8_triton:linear")
int8_linear.impl("torch_npu", "int8_torch_npu:linear", accepts=int8_torch_npu.reason)


_CASES: list[Values] = [
    {"tokens": (1,), "size": (5, 8)},
    {"tokens": (3,), "size": (48, 96), "bias": True},
    {"tokens": (3,), "size": (33, 70), "scale": 0.01},
    {"tokens": (2,), "size": (40, 1280), "bias": True},
    {"tokens": (0,), "size": (16, 32)},
    {"tokens": (19,), "size": (40, 72), "sliced": True, "bias": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size} for tokens in (1, 64, 8192) for size in ((5120, 2048), (2048, 4096))
]


@int8_linear.inputs(cases=_CASES, bench=_BENCH, words={"size": "N, K"})
def _(draw: Draw, size: tuple[int, int]) -> Values:
    codes, scales, _ = draw_weight(draw, *size, kind="int8")
    return {"codes": codes, "scales": scales.squeeze(-1)}
