"""The Hadamard transform, which spreads a head's outliers over all channels before quantisation to fp8."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, operator, widen


def _check(x: Tensor, scale: float | None) -> None:
    if x.shape[-1] & (x.shape[-1] - 1):
        raise ValueError(f"hadamard: the last dim of x is {x.shape[-1]}, expected a power of two")


@operator(check=_check, without={"torch_npu": "torch_npu has no Hadamard transform"})
def hadamard(x: Annotated[Tensor, "[..., D>0] float"], scale: float | None = None) -> Annotated[Tensor, "[..., D] x"]:
    """Transform the last dim: y = scale * x @ H, with H the Hadamard matrix in Sylvester's order.

    D is a power of two; y is contiguous. `scale` defaults to D^-0.5, with which the transform is orthogonal and its own
    inverse: transforming both queries and keys changes no score. Sums in fp32, rounded once. Differentiable.

        q = ops.hadamard(q)
    """
    wide, size = widen(x), x.shape[-1]
    matrix = torch.ones(1, 1, dtype=wide.dtype, device=x.device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (wide @ matrix * (size**-0.5 if scale is None else scale)).to(x.dtype).contiguous()


@hadamard.gradient()
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    """Apply the same transform to the gradient, since H is symmetric."""
    return {"x": hadamard(grads[0], args["scale"], backend=args["backend"])}


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return None if x.shape[-1] <= 512 else f"a row of {x.shape[-1]} does not fit one program (512)"


hadamard.impl("triton", "hadamard_triton:forward", accepts=_triton_reason)


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (3, 5, 128), "scale": 0.01},
    {"shape": (7, 64), "factor": 1.0},
    {"shape": (0, 32)},
    {"shape": (5, 16), "sliced": True},
    {"shape": (3, 1)},
]
_BENCH: list[Values] = [{"shape": (4096, 64, 128)}, {"shape": (4096, 128)}]


@hadamard.inputs(cases=_CASES, bench=_BENCH)
def _(draw: Draw, factor: float | None = None) -> Values:
    return {"scale": factor}
