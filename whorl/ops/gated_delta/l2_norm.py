"""The norm of query and key heads of gated delta layers."""

from typing import Annotated

import torch
from torch import Tensor

from .._op import Values, narrow, operator, widen

_X = Annotated[Tensor, "[..., D] float"]
_LIKE_X = Annotated[Tensor, "[..., D] x"]
_EPS = Annotated[float, "> 0"]
WITHOUT = {"torch_npu": "torch_npu has no norm of this kind"}


@operator(sharding="rows", without=WITHOUT)
def l2_norm(x: _X, eps: _EPS = 1e-6) -> _LIKE_X:
    """y = x / sqrt(sum(x^2) + eps), over the last dim, contiguous. fp32 inside, one rounding. Differentiable.

    qk = ops.l2_norm(qk.unflatten(-1, (2 * num_key_heads, 128)))
    """
    wide = widen(x)
    return narrow(wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps), x.dtype).contiguous()


@operator(sharding="rows", without=WITHOUT)
def l2_norm_backward(dy: _LIKE_X, x: _X, eps: _EPS = 1e-6) -> _LIKE_X:
    """Gradient of `l2_norm` with respect to x, in fp32, rounded once."""
    wide, grad = widen(x), widen(dy)
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    unit = wide * inverse
    dx = inverse * (grad - unit * (grad * unit).sum(-1, keepdim=True))
    return narrow(dx, x.dtype).contiguous()


@l2_norm.gradient(save=("x",))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    return {"x": l2_norm_backward(grads[0], args["x"], args["eps"], backend=args["backend"])}


l2_norm.impl("triton", "heads_triton:l2_norm")
l2_norm_backward.impl("triton", "heads_triton:l2_norm_backward")


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (2, 3, 96)},
    {"shape": (3, 5)},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": True, "eps": 1e-3},
]
_BENCH: list[Values] = [{"shape": (8192, 32, 128), "sliced": 4096}, {"shape": (64, 32, 128)}]

l2_norm.inputs(cases=_CASES, bench=_BENCH)
l2_norm_backward.inputs(cases=_CASES, bench=_BENCH)
