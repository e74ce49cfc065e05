"""RMSNorm on CPUs."""

from typing import Any

import torch
from torch import Tensor

from .library import Norm, address, library, plain, use_threads


def described(norm: Any, x: Tensor, residual: Tensor | None) -> Norm | None:
    """Return a norm layer as the library takes it; None where it or the tensors are of another form.

    norm: has weight, eps and plus_one; x, residual: fp32 and contiguous.
    """
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dtype != torch.float32 or not hasattr(norm, "plus_one") or hasattr(norm, "bias"):
        return None
    if not x.is_contiguous() or not (residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)):
        return None
    return Norm(weight.data_ptr(), norm.eps, norm.plus_one)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, plus_one: bool = False) -> Tensor:
    y, _ = _normalised(x, None, weight, eps, plus_one)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.float32:  # the sum is rounded before it is normalised
        total = (x.float() + residual.float()).to(x.dtype).contiguous()
        return rms_norm(total, weight, eps, plus_one=plus_one), total
    y, total = _normalised(x, residual, weight, eps, plus_one)
    return y, total


def _normalised(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    width, wide, scale = x.shape[-1], plain(x).contiguous(), plain(weight).contiguous()
    more = None if residual is None else residual.contiguous()
    y = torch.empty(x.shape)
    total = wide if residual is None else torch.empty(x.shape)
    use_threads()
    library().whorl_cpu_norm(
        *(wide.data_ptr(), address(more), scale.data_ptr(), eps, plus_one, wide.numel() // max(width, 1), width),
        *(y.data_ptr(), None if residual is None else total.data_ptr(), None, None, 0, None),
    )
    return (y if x.dtype == torch.float32 else y.to(x.dtype)), total
