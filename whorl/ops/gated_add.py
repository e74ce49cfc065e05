"""The sum of two tensors of which one has a gate for each token, as the shared expert of Qwen3-Next has."""

from typing import Annotated

import torch
from torch import Tensor

from ._op import Values, narrow, operator, widen

_Y = Annotated[Tensor, "[..., C] float"]
_LIKE_Y = Annotated[Tensor, "[..., C] y"]
_GATE = Annotated[Tensor, "[...] y"]
WITHOUT = {"torch_npu": "torch_npu has no operator that gates a sum"}


def _share(gate: Tensor) -> Tensor:
    """Return sigmoid(gate) [..., 1]. Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory."""
    return (1 / (1 + torch.exp(-widen(gate)))).unsqueeze(-1)


@operator(sharding="rows", without=WITHOUT)
def gated_add(y: _Y, x: _LIKE_Y, gate: _GATE) -> _LIKE_Y:
    """Return y + x sigmoid(gate), contiguous; a token has one gate. fp32 inside, one rounding. Differentiable.

    out = ops.gated_add(routed, shared, gate)
    """
    return narrow(widen(y) + widen(x) * _share(gate), y.dtype).contiguous()


@operator(sharding="rows", without=WITHOUT)
def gated_add_backward(
    dout: Annotated[Tensor, "[..., C] x"], x: _Y, gate: Annotated[Tensor, "[...] x"]
) -> tuple[Annotated[Tensor, "[..., C] x"], Annotated[Tensor, "[...] x"]]:
    """Gradients of `gated_add` with respect to x and gate, in fp32 and rounded once; that of y is dout."""
    wide, share = widen(dout), _share(gate)
    dgate = (wide * widen(x)).sum(-1) * (share * (1 - share)).squeeze(-1)
    return narrow(wide * share, x.dtype).contiguous(), narrow(dgate, gate.dtype).contiguous()


@gated_add.gradient(save=("x", "gate"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dx, dgate = gated_add_backward(grads[0], args["x"], args["gate"], backend=args["backend"])
    return {"y": grads[0], "x": dx, "gate": dgate}


gated_add.impl("triton", "gated_add_triton:forward")
gated_add_backward.impl("triton", "gated_add_triton:backward")


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (2, 3, 96)},
    {"shape": (3, 1029)},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": True},
]
_BENCH: list[Values] = [{"shape": (8192, 2048)}, {"shape": (64, 2048)}]

gated_add.inputs(cases=_CASES, bench=_BENCH)
gated_add_backward.inputs(cases=_CASES, bench=_BENCH)
