"""Gated activations: SwiGLU of Llama, Qwen, DeepSeek and most other models, GeGLU of Gemma."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from whorl.contracts import geglu_limit, swiglu_limit

from . import _torch_npu
from ._gelu import CUBE, SLOPE
from ._op import Values, narrow, operator, widen
from ._torch_npu import dtype_name

_NPU_GELU = {"dim": -1, "approximate": 1, "activate_left": True}  # tanh approximation; the gate is the first half
Activation = Literal["silu", "gelu_tanh"]


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of gate and up in x [..., 2F], each [..., F]."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, -1)
    return gate, up


def _share(gate: Tensor) -> Tensor:
    """Return gelu(gate) / gate."""
    # Not torch.tanh: on a CPU its bits depend on where an element lies in memory, and a row's bits must not. The clamp
    # keeps the exponential finite, since an infinite one would have no derivative; the result there is below 2e-35.
    return 1 / (1 + torch.exp((-SLOPE * (gate + CUBE * gate * gate * gate)).clamp(max=80.0)))


@operator(sharding="rows")
def glu(
    x: Annotated[Tensor, "[..., 2*F] float"], *, activation: Activation = "silu", interleaved: bool = False
) -> Annotated[Tensor, "[..., F] x"]:
    """y = activation(gate) * up.

    Gate is the first half of x and up the second or, with `interleaved`, gate is in the even and up in the odd channels
    (gpt-oss). "gelu_tanh" is the tanh approximation of GELU. Returns y contiguous. Computed in fp32, rounded once.
    Differentiable.

        y = ops.glu(ops.linear(x, gate_up))
    """
    gate, up = _split(widen(x), interleaved)
    # Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory, and a row's bits must not.
    active = gate / (1 + torch.exp(-gate)) if activation == "silu" else gate * _share(gate)
    return narrow(active * up, x.dtype).contiguous()


@operator(sharding="rows")
def glu_backward(
    dy: Annotated[Tensor, "[..., F] x"],
    x: Annotated[Tensor, "[..., 2*F] float"],
    *,
    activation: Activation = "silu",
    interleaved: bool = False,
) -> Annotated[Tensor, "[..., 2*F] x"]:
    """Gradient of `glu` with respect to x, computed in fp32 and rounded once."""
    gate, up = _split(widen(x), interleaved)
    wide = widen(dy)
    if activation == "silu":
        share, slope = torch.sigmoid(gate), torch.ones_like(gate)
    else:
        share, slope = _share(gate), SLOPE * (1 + 3 * CUBE * gate * gate)
    dgate = wide * up * share * (1 + gate * (1 - share) * slope)
    dup = wide * gate * share
    dx = torch.stack((dgate, dup), -1).flatten(-2) if interleaved else torch.cat((dgate, dup), -1)
    return dx.to(x.dtype)


@glu.gradient(save=("x",))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    options = {name: args[name] for name in ("activation", "interleaved", "backend")}
    return {"x": glu_backward(grads[0], args["x"], **options)}


glu.impl("cpp", "whorl.ops.cpu.glu:glu")
glu_backward.impl("cpp", takes_fp64=False)(glu_backward.reference)
glu.impl("triton", "glu_triton:forward")
glu_backward.impl("triton", "glu_triton:backward")


def _npu_reason(x: Tensor, activation: Activation, interleaved: bool, **_: object) -> str | None:
    limit, name = (swiglu_limit, "npu_swiglu") if activation == "silu" else (geglu_limit, "npu_geglu")
    if interleaved:
        return f"{name} takes gate and up as halves, not interleaved"
    return limit(shape=x.shape, dtype=dtype_name(x))


@glu.impl("torch_npu", accepts=_npu_reason)
def _(x, activation, interleaved):  # type: ignore[no-untyped-def]
    if activation == "silu":
        return _torch_npu.call("npu_swiglu", input=x.contiguous(), dim=-1)
    return _torch_npu.call("npu_geglu", input=x.contiguous(), **_NPU_GELU)[0]


@glu_backward.impl("torch_npu", accepts=_npu_reason)
def _(dy, x, activation, interleaved):  # type: ignore[no-untyped-def]
    if activation == "silu":
        return torch.ops.npu.npu_swiglu_backward(dy.contiguous(), x.contiguous(), -1)
    # Not npu_geglu_grad: in torch_npu 2.13 its fake kernel returns two tensors, so it cannot be traced.
    wide, grad = x.contiguous().float(), dy.float()
    gate, up = wide.chunk(2, -1)
    gelu = _torch_npu.call("npu_geglu", input=wide, **_NPU_GELU)[1]
    dgate = _torch_npu.call("npu_gelu_backward", grad_output=grad * up, input=gate.contiguous(), approximate="tanh")
    return torch.cat((dgate, grad * gelu), -1).to(x.dtype)


_CASES: list[Values] = [
    {"shape": (1, 2)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (3, 5, 194), "interleaved": True},
    {"shape": (5, 4098)},
    {"shape": (2, 4100), "interleaved": True},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": 6},
    {"shape": (6, 70), "sliced": True, "interleaved": True},
]
_CASES += [case | {"activation": "gelu_tanh"} for case in (*_CASES[:2], *_CASES[3:])]
_CASES.append({"shape": (3, 5, 194), "activation": "gelu_tanh", "scale": 3.0})
_BENCH: list[Values] = [{"shape": (16384, 2 * 8192)}, {"shape": (4096, 2 * 18432)}, {"shape": (1, 2 * 12288)}]
_BENCH += [
    {"shape": shape, "activation": "gelu_tanh"} for shape in ((16384, 2 * 6912), (4096, 2 * 21504), (1, 2 * 6912))
]


glu.inputs(cases=_CASES, bench=_BENCH)
glu_backward.inputs(cases=_CASES, bench=[case for case in _BENCH if case["shape"][0] > 1])
