"""The Hadamard transform, which spreads a head's outliers over all channels before quantisation to fp8."""

import torch
from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values, operator, widen

_WITHOUT = {"torch_npu": "torch_npu has no Hadamard transform"}


def _check(x: Tensor, scale: float | None, name: str = "hadamard", argument: str = "x") -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"{name}: {argument} is {list(x.shape)} {x.dtype}, expected [..., D] floating point")
    if x.shape[-1] & (x.shape[-1] - 1) or not x.shape[-1]:
        raise ValueError(f"{name}: the last dim of {argument} is {x.shape[-1]}, expected a power of two")


def _check_backward(dy: Tensor, scale: float | None) -> None:
    _check(dy, scale, "hadamard_backward", "dy")


@operator(check=_check, without=_WITHOUT)
def hadamard(x: Tensor, scale: float | None = None) -> Tensor:
    """Transform the last dim: y = scale * x @ H, with H the Hadamard matrix in Sylvester's order.

    x: [..., D] bf16, fp16 or fp32, D a power of two; y: like x, contiguous. `scale` defaults to D^-0.5, with which the
    transform is orthogonal and its own inverse: transforming both queries and keys changes no score. Sums in fp32,
    rounded once. Differentiable. Raises ValueError when D is not a power of two.

        q = ops.hadamard(q)
    """
    wide, size = widen(x), x.shape[-1]
    matrix = torch.ones(1, 1, dtype=wide.dtype, device=x.device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (wide @ matrix * (size**-0.5 if scale is None else scale)).to(x.dtype).contiguous()


@operator(check=_check_backward, without=_WITHOUT)
def hadamard_backward(dy: Tensor, scale: float | None = None) -> Tensor:
    """Gradient of `hadamard` with respect to x: the same transform of dy [..., D], since H is symmetric."""
    return hadamard.reference(dy, scale)


@hadamard.gradient()
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    return {"x": hadamard_backward(grads[0], args["scale"], backend=args["backend"])}


def _triton_reason(x: Tensor, **_: object) -> str | None:
    if x.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if x.shape[-1] <= 512 else f"a row of {x.shape[-1]} does not fit one program (512)"


hadamard.impl("triton", "hadamard_triton:forward", accepts=_triton_reason)
hadamard_backward.impl("triton", "hadamard_triton:backward", accepts=lambda dy, **_: _triton_reason(dy))


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (3, 5, 128), "scale": 0.01},
    {"shape": (7, 64), "factor": 1.0},
    {"shape": (0, 32)},
    {"shape": (5, 16), "sliced": True},
    {"shape": (3, 1)},
]
_BENCH: list[Values] = [{"shape": (4096, 64, 128)}, {"shape": (4096, 128)}]


def _make(draw: Draw, shape: Sizes, factor: float | None = None) -> Values:
    return {"x": draw.scaled(*shape), "scale": factor}


def _make_backward(draw: Draw, shape: Sizes, factor: float | None = None) -> Values:
    return {"dy": draw.scaled(*shape), "scale": factor}


hadamard.inputs(cases=_CASES, bench=_BENCH)(_make)
hadamard_backward.inputs(cases=_CASES, bench=_BENCH)(_make_backward)
