"""RMSNorm of a gated delta layer's heads, times their gate."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from .._op import Values, narrow, operator, widen

_X = Annotated[Tensor, "[..., D] float"]
_LIKE_X = Annotated[Tensor, "[..., D] x"]
_WEIGHT = Annotated[Tensor, "[D] x or fp32"]
_EPS = Annotated[float, "> 0"]
GateActivation = Literal["silu", "sigmoid"]
WITHOUT = {"torch_npu": "npu_rms_norm takes no gate"}


def _share(gate: Tensor) -> Tensor:
    """Return sigmoid(gate). Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory."""
    return 1 / (1 + torch.exp(-gate))


@operator(sharding="rows", without=WITHOUT)
def gated_rms_norm(
    x: _X, gate: _LIKE_X, weight: _WEIGHT, eps: _EPS = 1e-6, *, activation: GateActivation = "silu"
) -> _LIKE_X:
    """y = x / sqrt(mean(x^2) + eps) * weight * activation(gate), over the last dim; returns y contiguous.

    Everything is computed in fp32 and rounded once at the end; Hugging Face rounds once more, before the weight. The
    weight is multiplied as it is, without 1. Differentiable.

        y = ops.gated_rms_norm(out, z, layer.norm.weight, 1e-6)
    """
    wide, z = widen(x), widen(gate)
    active = z * _share(z) if activation == "silu" else _share(z)
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return narrow(unit * widen(weight) * active, x.dtype).contiguous()


@operator(sharding="rows", without=WITHOUT)
def gated_rms_norm_backward(
    dy: _LIKE_X, x: _X, gate: _LIKE_X, weight: _WEIGHT, eps: _EPS = 1e-6, *, activation: GateActivation = "silu"
) -> tuple[_LIKE_X, _LIKE_X, Annotated[Tensor, "[D] weight"]]:
    """Gradients of `gated_rms_norm` with respect to x, gate and weight, in fp32 and rounded once."""
    wide, z, grad, scale = widen(x), widen(gate), widen(dy), widen(weight)
    share = torch.sigmoid(z)
    active = z * share if activation == "silu" else share
    slope = share * (1 + z * (1 - share)) if activation == "silu" else share * (1 - share)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * inverse
    dunit = grad * scale * active
    dx = inverse * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    dgate = grad * scale * unit * slope
    dweight = (grad * active * unit).flatten(0, -2).sum(0)
    return narrow(dx, x.dtype).contiguous(), narrow(dgate, x.dtype).contiguous(), narrow(dweight, weight.dtype)


@gated_rms_norm.gradient(save=("x", "gate", "weight"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    names = ("x", "gate", "weight")
    options = {name: args[name] for name in ("eps", "activation", "backend")}
    gradients = gated_rms_norm_backward(grads[0], *(args[name] for name in names), **options)
    return dict(zip(names, gradients, strict=True))


gated_rms_norm.impl("triton", "heads_triton:gated_rms_norm")
gated_rms_norm_backward.impl("triton", "heads_triton:gated_rms_norm_backward")


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (2, 3, 96), "activation": "sigmoid"},
    {"shape": (3, 5), "weight": torch.float32},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": True, "eps": 1e-3},
    {"shape": (300, 128)},
]
_BENCH: list[Values] = [{"shape": (8192, 32, 128)}, {"shape": (64, 32, 128)}]

gated_rms_norm.inputs(cases=_CASES, bench=_BENCH)
gated_rms_norm_backward.inputs(cases=_CASES, bench=_BENCH)
