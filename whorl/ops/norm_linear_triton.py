"""`norm_linear` in Triton: by one kernel for few rows on Hopper, else by the kernels of the norm and of the product."""

from torch import Tensor

from . import linear_triton, rms_norm_triton
from ._hopper import on_hopper

one_row_on_hopper = on_hopper(f"{__package__}.few_rows_hopper_triton", "fits_norm")


def forward(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, weight = (linear_triton.unit_stride(t) for t in (x, residual, weight))
    if len(x) == 1 and (hopper := one_row_on_hopper(x, weight)) is not None:
        return hopper.norm_linear(x, residual, norm_weight.contiguous(), weight, eps, plus_one)  # type: ignore[no-any-return]
    normed, total = rms_norm_triton.add_forward(x, residual, norm_weight, eps, plus_one)
    return linear_triton.forward(normed, weight, None), normed, total
