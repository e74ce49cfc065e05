"""The gates of gated delta layers: how much of the state each head forgets, and how strongly it is updated."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen

_A = Annotated[Tensor, "[..., H] float"]
_LIKE_A = Annotated[Tensor, "[..., H] a"]
_GATE = Annotated[Tensor, "[..., H] fp32"]
_PARAMETER = Annotated[Tensor, "[H] a or fp32"]
LINEAR = 20.0  # softplus(x) is x above this, as in torch
LARGEST = 80.0  # e^x is finite in fp32 up to this and further; 1 / (1 + e^x) is 0 for any use
WITHOUT = {"torch_npu": "torch_npu has no such operator"}


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x). Of functions whose bits do not depend on where an element lies in a CPU's memory."""
    return torch.where(x > LINEAR, x, torch.log1p(torch.exp(x.clamp(max=LINEAR))))


@operator(sharding="rows", without=WITHOUT)
def delta_gates(a: _A, b: _LIKE_A, a_log: _PARAMETER, dt_bias: _PARAMETER) -> tuple[_GATE, _GATE]:
    """Return g = -exp(a_log) softplus(a + dt_bias), which is 0 at most, and beta = sigmoid(b), both in fp32.

    A token's state is multiplied by e^g before its update, which beta scales. Computed in fp32 and not rounded to a's
    dtype. Differentiable.

        g, beta = ops.delta_gates(a, b, layer.A_log, layer.dt_bias)
    """
    g = -widen(a_log).exp() * _softplus(widen(a) + widen(dt_bias))
    return g.contiguous(), (1 / (1 + torch.exp((-widen(b)).clamp(max=LARGEST)))).contiguous()


@operator(sharding="rows", without=WITHOUT)
def delta_gates_backward(
    dg: _GATE, dbeta: _GATE, a: _A, b: _LIKE_A, a_log: _PARAMETER, dt_bias: _PARAMETER
) -> tuple[_LIKE_A, _LIKE_A, Annotated[Tensor, "[H] a_log"], Annotated[Tensor, "[H] dt_bias"]]:
    """Gradients of `delta_gates` with respect to a, b, a_log and dt_bias, in fp32 and rounded once."""
    x, rate = widen(a) + widen(dt_bias), -widen(a_log).exp()
    dx = dg * rate * torch.where(x > LINEAR, 1, torch.sigmoid(x))
    beta = torch.sigmoid(widen(b))
    da_log = (dg * rate * _softplus(x)).flatten(0, -2).sum(0)
    ddt_bias = dx.flatten(0, -2).sum(0)
    da, db = dx.to(a.dtype), (dbeta * beta * (1 - beta)).to(a.dtype)
    return da.contiguous(), db.contiguous(), narrow(da_log, a_log.dtype), narrow(ddt_bias, dt_bias.dtype)


@delta_gates.gradient(save=("a", "b", "a_log", "dt_bias"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    names = ("a", "b", "a_log", "dt_bias")
    wide = widen(args["a"])
    dg, dbeta = (torch.zeros_like(wide) if grad is None else grad for grad in grads)
    gradients = delta_gates_backward(dg, dbeta, *(args[name] for name in names), backend=args["backend"])
    return dict(zip(names, gradients, strict=True))


delta_gates.impl("triton", "gates_triton:forward")
delta_gates_backward.impl("triton", "gates_triton:backward")


_CASES: list[Values] = [
    {"tokens": (1,), "heads": 4},
    {"tokens": (17,), "heads": 32, "scale": 0.01},
    {"tokens": (2, 13), "heads": 40, "a_log": torch.float32, "dt_bias": torch.float32},
    {"tokens": (7,), "heads": 48, "scale": 30.0},
    {"tokens": (0,), "heads": 8},
    {"tokens": (6,), "heads": 16, "sliced": True},
    {"tokens": (300,), "heads": 32},
]
_QWEN = {"heads": 32, "a_log": torch.float32, "dt_bias": torch.float32}
_BENCH: list[Values] = [{"tokens": (8192,), **_QWEN}, {"tokens": (64,), **_QWEN}]


def _make(draw: Draw, heads: int, a_log: torch.dtype | None = None) -> Values:
    kind = a_log or draw.dtype
    return {"a_log": torch.randn(heads, device=draw.device).to(draw.wide if kind == torch.float32 else kind)}


delta_gates.inputs(cases=_CASES, bench=_BENCH, words={"heads": "H"})(_make)
delta_gates_backward.inputs(cases=_CASES, bench=_BENCH, words={"heads": "H"})(_make)
