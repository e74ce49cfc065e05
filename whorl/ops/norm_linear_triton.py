"""`norm_linear` in Triton: by one kernel for few rows on Hopper, else by the kernels of the norm and of the product."""

from torch import Tensor

from . import linear_triton, rms_norm_triton


def forward(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, weight = (linear_triton.unit_stride(t) for t in (x, residual, weight))
    hopper = linear_triton.few_rows(x, weight)
    if hopper is not None and (hopper.fits_warpgroup(x, weight, normed=True) or hopper.fits_one_warp(x, weight)):
        return hopper.norm_linear(x, residual, norm_weight.contiguous(), weight, eps)  # type: ignore[no-any-return]
    normed, total = rms_norm_triton.add_forward(x, residual, norm_weight, eps, False)
    return linear_triton.forward(normed, weight, None), normed, total
