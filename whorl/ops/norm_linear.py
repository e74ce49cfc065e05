"""RMSNorm with residual followed by a linear layer, as at the start of an attention block and of an MLP."""

from typing import Annotated

import torch
from torch import Tensor

from ._op import Values, narrow, operator, widen
from .linear import multiply
from .rms_norm import norm

_LIKE_X = Annotated[Tensor, "[T, K] x"]
NO_NPU = "torch_npu has no operator that fuses a norm into a product: the engine calls add_rms_norm and linear there"


@operator(forward_only=True, flops="2*T*N*K", without={"torch_npu": NO_NPU})
def norm_linear(
    x: Annotated[Tensor, "[T, K] float"],
    residual: _LIKE_X,
    norm_weight: Annotated[Tensor, "[K] x or fp32"],
    weight: Annotated[Tensor, "[N, K] x"],
    eps: Annotated[float, "> 0"] = 1e-6,
    *,
    plus_one: bool = False,
) -> tuple[Annotated[Tensor, "[T, N] x"], _LIKE_X, _LIKE_X]:
    """h = x + residual; n = rms_norm(h); y = n @ weight.T. Returns y, n and h. `plus_one` is that of `rms_norm`.

    All three are contiguous. The bits are equal to those of `add_rms_norm` followed by `linear`. Not differentiable:
    use those two.

        qkv, normed, residual = ops.norm_linear(x, residual, norm.weight, qkv_proj.weight, eps)
    """
    total = narrow(widen(x) + widen(residual), x.dtype).contiguous()
    normed = narrow(norm(total, norm_weight, eps, plus_one), x.dtype).contiguous()
    return narrow(multiply(widen(normed), widen(weight)), x.dtype), normed, total


norm_linear.impl("cpp", "whorl.ops.cpu.linear:norm_linear")
norm_linear.impl("triton", "norm_linear_triton:forward")


_CASES: list[Values] = [
    {"tokens": (1,), "size": (48, 64)},
    {"tokens": (3,), "size": (33, 40), "scale": 0.01},
    {"tokens": (2,), "size": (5, 136), "norm_weight": torch.float32},
    {"tokens": (0,), "size": (16, 32)},
    {"tokens": (17,), "size": (40, 64), "sliced": True},
    {"tokens": (1,), "size": (64, 512), "plus_one": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size} for tokens in (1, 8, 64) for size in ((5120, 2048), (128, 2048))
]
_BENCH += [{"tokens": (1,), "size": (4096, 1024)}]


norm_linear.inputs(cases=_CASES, bench=_BENCH, words={"size": "N, K"})
