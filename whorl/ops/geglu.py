"""GeGLU, the gated activation of Gemma."""

import torch
from torch import Tensor

from whorl.contracts import geglu_limit

from . import _torch_npu
from ._check import check_like
from ._draw import Draw, Sizes
from ._gelu import CUBE, SLOPE
from ._op import Values, narrow, operator, widen
from ._torch_npu import dtype_name
from .swiglu import row_wise

_NPU_OPTIONS = {"dim": -1, "approximate": 1, "activate_left": True}  # tanh approximation; the gate is the first half


def _check(x: Tensor, name: str = "geglu") -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name}: x is {x.dtype}, expected a floating point dtype")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{name}: x is {list(x.shape)}, expected an even last dim (gate and up)")


def _check_backward(dy: Tensor, x: Tensor) -> None:
    _check(x, "geglu_backward")
    check_like("geglu_backward", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)


def _share(gate: Tensor) -> Tensor:
    """Return gelu(gate) / gate, the sigmoid of `_gelu.py`."""
    # Not torch.tanh: on a CPU its bits depend on where an element lies in memory, and a row's bits must not. The clamp
    # keeps the exponential finite, since an infinite one would have no derivative; the result there is below 2e-35.
    return 1 / (1 + torch.exp((-SLOPE * (gate + CUBE * gate * gate * gate)).clamp(max=80.0)))


@operator(check=_check, sharding=row_wise)
def geglu(x: Tensor) -> Tensor:
    """y = gelu(gate) * up, with the tanh approximation of GELU.

    x: [..., 2F] bf16, fp16 or fp32, gate in the first half and up in the second; returns y: [..., F] in x's dtype,
    contiguous. Computed in fp32, rounded once. Differentiable. Raises ValueError when the last dim is odd.

        y = ops.geglu(ops.linear(x, gate_up))
    """
    gate, up = widen(x).chunk(2, -1)
    return narrow(gate * _share(gate) * up, x.dtype).contiguous()


@operator(check=_check_backward, sharding=row_wise)
def geglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of `geglu` with respect to x, computed in fp32 and rounded once. dy: [..., F]; returns dx like x."""
    gate, up = widen(x).chunk(2, -1)
    wide, share = widen(dy), _share(gate)
    slope = SLOPE * (1 + 3 * CUBE * gate * gate)
    dgate = wide * up * share * (1 + gate * (1 - share) * slope)
    return torch.cat((dgate, wide * gate * share), -1).to(x.dtype)


@geglu.gradient(save=("x",))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    return {"x": geglu_backward(grads[0], args["x"], backend=args["backend"])}


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if x.dtype == torch.float64 else None


geglu.impl("triton", "geglu_triton:forward", accepts=_triton_reason)
geglu_backward.impl("triton", "geglu_triton:backward", accepts=_triton_reason)


def _npu_reason(x: Tensor, **_: object) -> str | None:
    return geglu_limit(shape=x.shape, dtype=dtype_name(x))


@geglu.impl("torch_npu", accepts=_npu_reason)
def _(x):  # type: ignore[no-untyped-def]
    return _torch_npu.call("npu_geglu", input=x.contiguous(), **_NPU_OPTIONS)[0]


@geglu_backward.impl("torch_npu", accepts=_npu_reason)
def _(dy, x):  # type: ignore[no-untyped-def]
    # Not npu_geglu_grad: in torch_npu 2.13 its fake kernel returns two tensors, so it cannot be traced.
    wide, grad = x.contiguous().float(), dy.float()
    gate, up = wide.chunk(2, -1)
    gelu = _torch_npu.call("npu_geglu", input=wide, **_NPU_OPTIONS)[1]
    dgate = _torch_npu.call("npu_gelu_backward", grad_output=grad * up, input=gate.contiguous(), approximate="tanh")
    return torch.cat((dgate, grad * gelu), -1).to(x.dtype)


_CASES: list[Values] = [
    {"shape": (1, 2)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (3, 5, 194), "scale": 3.0},
    {"shape": (5, 4098)},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": True},
]
_BENCH: list[Values] = [{"shape": (16384, 2 * 6912)}, {"shape": (4096, 2 * 21504)}, {"shape": (1, 2 * 6912)}]


def _make(draw: Draw, shape: Sizes) -> Values:
    return {"x": draw.scaled(*shape, gap=6)}


def _make_backward(draw: Draw, shape: Sizes) -> Values:
    return {"dy": torch.randn(*shape[:-1], shape[-1] // 2, **draw.kind), **_make(draw, shape)}


geglu.inputs(cases=_CASES, bench=_BENCH)(_make)
geglu_backward.inputs(cases=_CASES, bench=_BENCH[:2])(_make_backward)
