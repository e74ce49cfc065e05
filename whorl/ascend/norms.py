"""RMS norm, with and without a residual, and SwiGLU."""

import torch
from torch import Tensor

from whorl import contracts, ops

from .calling import Misfit, operator


@operator(contracts.rms_norm_limit)
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Return y = input / rms * gamma over gamma's dims, and 1 / rms.

    input: [..., *dims]; gamma: [*dims]. y is like input; 1 / rms is fp32 with gamma's dims set to 1. Differentiable in
    input and gamma; no gradient flows through the second output.

    Example: y, _ = npu_rms_norm(x, gamma, epsilon=1e-6)
    """
    y = ops.rms_norm(_flatten_dims(input, gamma), gamma.flatten(), epsilon)
    return y.view(input.shape), _inverse_rms(input, gamma, epsilon)


@operator(contracts.add_rms_norm_limit, no_gradient="x1 x2 gamma")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """Return npu_rms_norm of x = x1 + x2: y, 1 / rms in fp32, and x.

    x1, x2: of the same shape; gamma: the trailing dims. Raises RuntimeError when a gradient is needed, which torch_npu
    does not have.

    Example: y, _, residual = npu_add_rms_norm(x, residual, gamma)
    """
    y, x = ops.add_rms_norm(_flatten_dims(x1, gamma), _flatten_dims(x2, gamma), gamma.flatten(), epsilon)
    x = x.view(x1.shape)
    return y.view(x1.shape), _inverse_rms(x, gamma, epsilon), x


@operator(contracts.swiglu_limit, contiguous=lambda call: call["input"].is_contiguous())
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return silu(first half) * second half along `dim`, differentiable; raises ValueError for an odd size.

    Example: y = npu_swiglu(gate_up)
    """
    if input.shape[dim] % 2:
        raise Misfit(f"input is {list(input.shape)}, expected an even size along dim {dim}")
    return ops.glu(input.movedim(dim, -1)).movedim(-1, dim).contiguous()


def _flatten_dims(x: Tensor, gamma: Tensor) -> Tensor:
    """Return x with gamma's dims flattened into the last."""
    return x if gamma.dim() == 1 else x.flatten(-gamma.dim())


def _inverse_rms(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    dims = tuple(range(-gamma.dim(), 0))
    return torch.rsqrt(x.detach().float().square().mean(dims, keepdim=True) + epsilon)
