"""Products with plain weights on CPUs: sixteen sums along K for each result, added in one tree."""

from ctypes import byref

import torch
from torch import Tensor

from .library import TYPES, Plain, address, library, plain, use_threads


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = multiply(x, weight, bias)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in fp32; weight: [N, K] of 16 or 32 bits, any number of elements from row to row."""
    weight = weight if weight.stride(-1) == 1 or weight.shape[-1] == 1 else weight.contiguous()
    wide, bias = plain(x), None if bias is None else plain(bias).contiguous()
    y = torch.empty(x.shape[0], weight.shape[0])
    described = Plain(weight.data_ptr(), *weight.shape, weight.stride(0), TYPES[weight.dtype])
    use_threads()
    library().whorl_cpu_linear_plain(
        byref(described), wide.data_ptr(), x.shape[0], wide.stride(0), y.data_ptr(), len(weight), address(bias)
    )
    return y


def norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6, plus_one: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    from .norm import add_rms_norm

    normed, total = add_rms_norm(x, residual, norm_weight, eps, plus_one=plus_one)
    return linear(normed, weight), normed, total
