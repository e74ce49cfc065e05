"""RMSNorm over the last dim, with or without the residual addition before it."""

from typing import Annotated

import torch
from torch import Tensor

from whorl.contracts import rms_norm_limit

from . import _torch_npu
from ._op import Values, narrow, operator, widen
from ._torch_npu import dtype_name

_X = Annotated[Tensor, "[..., C] float"]
_LIKE_X = Annotated[Tensor, "[..., C] x"]
_WEIGHT = Annotated[Tensor, "[C] x or fp32"]
_EPS = Annotated[float, "> 0"]


def _normalise(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x / rms(x), 1 / rms(x) and the scale (weight, or 1 + weight), all in fp32."""
    wide = widen(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale = weight.to(wide.dtype)
    return wide * inverse, inverse, scale + 1 if plus_one else scale


def norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """Return `rms_norm` in fp32, not yet rounded to x's dtype, by one call of torch."""
    wide = widen(x)
    scale = narrow(weight, wide.dtype)
    return torch.nn.functional.rms_norm(wide, weight.shape, scale + 1 if plus_one else scale, eps)


@operator(sharding="rows")
def rms_norm(x: _X, weight: _WEIGHT, eps: _EPS = 1e-6, *, plus_one: bool = False) -> _LIKE_X:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dim.

    Returns y contiguous. `plus_one` multiplies by 1 + weight, added in fp32 (Gemma). Everything is computed in fp32 and
    rounded once at the end; Hugging Face rounds once more, before the weight. A row of zeros gives zeros.
    Differentiable in x and weight.

        y = ops.rms_norm(x, layer.weight, 1e-6)
    """
    return narrow(norm(x, weight, eps, plus_one), x.dtype).contiguous()


@operator(sharding="rows")
def add_rms_norm(
    x: _X, residual: _LIKE_X, weight: _WEIGHT, eps: _EPS = 1e-6, *, plus_one: bool = False
) -> tuple[_LIKE_X, _LIKE_X]:
    """Add, then normalise: returns y = rms_norm(h) and the new residual h = x + residual.

    h is added in fp32 and rounded to x's dtype; the norm
    is of the rounded h, so the bits of the pair are equal to those of an addition followed by `rms_norm`. Inputs are
    not written. Differentiable in all three tensors.

        y, residual = ops.add_rms_norm(x, residual, layer.weight, 1e-6)
    """
    total = narrow(widen(x) + widen(residual), x.dtype).contiguous()
    return narrow(norm(total, weight, eps, plus_one), x.dtype), total


@operator(sharding="rows")
def rms_norm_backward(
    dy: _LIKE_X,
    x: _X,
    weight: _WEIGHT,
    residual_grad: Annotated[Tensor | None, "[..., C] x"] = None,
    *,
    eps: _EPS = 1e-6,
    plus_one: bool = False,
) -> tuple[_LIKE_X, Annotated[Tensor, "[C] weight"]]:
    """Gradients of `rms_norm` with respect to x and weight, computed in fp32, each rounded once.

    Returns dx, contiguous, and dweight. `residual_grad` is added to dx before rounding (on torch_npu after it): with
    the new residual h as x, and the gradient of h as residual_grad, this is the backward of `add_rms_norm`. 1 / rms is
    recomputed from x, which is read anyway.
    """
    unit, inverse, scale = _normalise(x, weight, eps, plus_one)
    wide = widen(dy)
    scaled = wide * scale
    dx = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + widen(residual_grad)
    dweight = (wide * unit).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype).contiguous(), dweight.to(weight.dtype)


def _options(args: Values) -> Values:
    """Return what `rms_norm_backward` takes by name besides the tensors."""
    return {name: args[name] for name in ("eps", "plus_one", "backend")}


@rms_norm.gradient(save=("x", "weight"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dx, dweight = rms_norm_backward(grads[0], args["x"], args["weight"], **_options(args))
    return {"x": dx, "weight": dweight}


@add_rms_norm.gradient(save=("weight",), save_outputs=(1,))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    dy, residual_grad = grads
    if dy is None:
        return {"x": residual_grad, "residual": residual_grad}
    dx, dweight = rms_norm_backward(dy, outputs[1], args["weight"], residual_grad, **_options(args))
    return {"x": dx, "residual": dx, "weight": dweight}


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return None if x.shape[-1] <= 65536 else f"a row of {x.shape[-1]} does not fit one program (65536)"


rms_norm.impl("cpp", "whorl.ops.cpu.norm:rms_norm")
add_rms_norm.impl("cpp", "whorl.ops.cpu.norm:add_rms_norm")
rms_norm_backward.impl("cpp", takes_fp64=False)(rms_norm_backward.reference)
rms_norm.impl("triton", "rms_norm_triton:forward", accepts=_triton_reason)
add_rms_norm.impl("triton", "rms_norm_triton:add_forward", accepts=_triton_reason)
rms_norm_backward.impl("triton", "rms_norm_triton:backward", accepts=_triton_reason)


def _npu_reason(x: Tensor, weight: Tensor, **_: object) -> str | None:
    if not x.numel():
        return "empty tensors are not taken"
    return rms_norm_limit(shape=x.shape, gamma_shape=weight.shape, dtype=dtype_name(x), gamma_dtype=dtype_name(weight))


def _gamma(weight: Tensor, plus_one: bool) -> Tensor:
    """Return weight, or 1 + weight in fp32: npu_rms_norm takes fp32 with 16-bit inputs, so the sum is not rounded."""
    return weight.float() + 1 if plus_one else weight


@rms_norm.impl("torch_npu", accepts=_npu_reason)
def _(x, weight, eps, plus_one):  # type: ignore[no-untyped-def]
    y, _ = _torch_npu.call("npu_rms_norm", input=x, gamma=_gamma(weight, plus_one), epsilon=eps)
    return y.contiguous()


@add_rms_norm.impl("torch_npu", accepts=_npu_reason)
def _(x, residual, weight, eps, plus_one):  # type: ignore[no-untyped-def]
    gamma = _gamma(weight, plus_one)
    # npu_add_rms_norm takes gamma only in x's dtype, and AscendC does not count it among the batch-invariant operators
    # as it does npu_rms_norm.
    if gamma.dtype != x.dtype or _torch_npu.batch_invariant("npu_mm"):
        total = (x + residual).contiguous()
        return _torch_npu.call("npu_rms_norm", input=total, gamma=gamma, epsilon=eps)[0], total
    y, _, total = _torch_npu.call("npu_add_rms_norm", x1=x, x2=residual, gamma=gamma, epsilon=eps)
    return y.contiguous(), total.contiguous()


@rms_norm_backward.impl("torch_npu", accepts=_npu_reason)
def _(dy, x, weight, residual_grad, eps, plus_one):  # type: ignore[no-untyped-def]
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    dx, dweight = torch.ops.npu.npu_rms_norm_backward(dy.contiguous(), x, _gamma(weight, plus_one), rstd)
    # The operator returns dx rounded to x's dtype, so with a residual_grad dx is rounded twice here.
    dx = dx if residual_grad is None else dx + residual_grad
    return dx.contiguous(), dweight.to(weight.dtype)


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (2, 3, 96), "plus_one": True},
    {"shape": (5, 4096)},
    {"shape": (3, 1000), "weight": torch.float32, "eps": 1e-3},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": 5},
    {"shape": (37, 5), "plus_one": True},
]
_BENCH: list[Values] = [{"shape": shape} for shape in ((4096, 7168), (16384, 4096), (1, 4096), (64, 4096))]


rms_norm.inputs(cases=_CASES, bench=_BENCH)
add_rms_norm.inputs(cases=_CASES, bench=_BENCH)
rms_norm_backward.inputs(
    cases=[*_CASES, {"shape": (17, 128), "residual_grad": True}, {"shape": (301, 64)}],
    bench=[*_BENCH[:2], {"shape": (4096, 7168), "residual_grad": True}],
)
