"""The norms and SwiGLU."""

from typing import Any

import torch
from torch import Tensor

from whorl import contracts, ops
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, refuse, refuse_gradient


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """y = input / rms * gamma over gamma's dims, and 1 / rms in float32 with those dims set to 1.

    Differentiable in input and gamma; no gradient flows through the second output.
    """
    name = "npu_rms_norm"
    if is_npu(input):
        return call_torch_npu(name, input, gamma, epsilon=epsilon)
    refuse(name, contracts.rms_norm_limit(**_sizes(input, gamma)))
    y = ops.rms_norm(_rows(input, gamma), gamma.flatten(), epsilon)
    return y.view(input.shape), _inverse_rms(input, gamma, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """npu_rms_norm of x = x1 + x2: returns y, 1 / rms in float32, and x. No gradient, as in torch_npu."""
    name = "npu_add_rms_norm"
    refuse_gradient(name, x1, x2, gamma)
    if is_npu(x1):
        return call_torch_npu(name, x1, x2, gamma, epsilon=epsilon)
    refuse(name, contracts.add_rms_norm_limit(**_sizes(x1, gamma), x2_shape=x2.shape))
    y, x = ops.add_rms_norm(_rows(x1, gamma), _rows(x2, gamma), gamma.flatten(), epsilon)
    x = x.view(x1.shape)
    return y.view(x1.shape), _inverse_rms(x, gamma, epsilon), x


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half along `dim`. Differentiable."""
    name = "npu_swiglu"
    if is_npu(input):
        return call_torch_npu(name, input, dim=dim)
    contiguous = input.is_contiguous()
    refuse(name, contracts.swiglu_limit(shape=input.shape, dim=dim, dtype=dtype_name(input), contiguous=contiguous))
    if input.shape[dim] % 2:
        raise ValueError(f"{name}: input is {list(input.shape)}, expected an even size along dim {dim}")
    return ops.swiglu(input.movedim(dim, -1)).movedim(-1, dim).contiguous()


def _sizes(x: Tensor, gamma: Tensor) -> dict[str, Any]:
    """What the limits of both norms ask for."""
    dtypes = {"dtype": dtype_name(x), "gamma_dtype": dtype_name(gamma)}
    return {"shape": x.shape, "gamma_shape": gamma.shape, **dtypes}


def _rows(x: Tensor, gamma: Tensor) -> Tensor:
    """x with gamma's dims flattened into the last."""
    return x if gamma.dim() == 1 else x.flatten(-gamma.dim())


def _inverse_rms(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    dims = tuple(range(-gamma.dim(), 0))
    return torch.rsqrt(x.detach().float().square().mean(dims, keepdim=True) + epsilon)
