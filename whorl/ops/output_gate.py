"""The gate of an attention's output, as Qwen3-Next has it."""

from typing import Annotated

import torch
from torch import Tensor

from ._op import Values, narrow, operator, widen

_X = Annotated[Tensor, "[..., C] float"]
_LIKE_X = Annotated[Tensor, "[..., C] x"]
WITHOUT = {"torch_npu": "torch_npu has no such operator"}


@operator(sharding="rows", without=WITHOUT)
def output_gate(x: _X, gate: _LIKE_X) -> _LIKE_X:
    """y = x sigmoid(gate), contiguous. fp32 inside, one rounding. Differentiable.

    y = ops.output_gate(out, gate)
    """
    # Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory, and a row's bits must not.
    return narrow(widen(x) * (1 / (1 + torch.exp(-widen(gate)))), x.dtype).contiguous()


@operator(sharding="rows", without=WITHOUT)
def output_gate_backward(dy: _LIKE_X, x: _X, gate: _LIKE_X) -> tuple[_LIKE_X, _LIKE_X]:
    """Gradients of `output_gate` with respect to x and gate, in fp32 and rounded once."""
    grad, share = widen(dy), torch.sigmoid(widen(gate))
    dgate = grad * widen(x) * share * (1 - share)
    return narrow(grad * share, x.dtype).contiguous(), narrow(dgate, x.dtype).contiguous()


@output_gate.gradient(save=("x", "gate"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dx, dgate = output_gate_backward(grads[0], args["x"], args["gate"], backend=args["backend"])
    return {"x": dx, "gate": dgate}


output_gate.impl("triton", "whorl.ops.gated_delta.heads_triton:output_gate")
output_gate_backward.impl("triton", "whorl.ops.gated_delta.heads_triton:output_gate_backward")


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (2, 3, 96)},
    {"shape": (3, 5)},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": True},
]
_BENCH: list[Values] = [{"shape": (8192, 16, 256), "sliced": 256}, {"shape": (64, 16, 256)}]

output_gate.inputs(cases=_CASES, bench=_BENCH)
output_gate_backward.inputs(cases=_CASES, bench=_BENCH)
