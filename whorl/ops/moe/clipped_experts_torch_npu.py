"""The experts of gpt-oss on Ascend: permute, grouped product, npu_clipped_swiglu, grouped product, weighted sum."""

from typing import Any

import torch
from torch import Tensor

from .. import _torch_npu
from .._torch_npu import dtype_name
from . import experts_torch_npu
from .experts_torch_npu import grouped_product, run_routed

ACTIVATION = "npu_clipped_swiglu"


def reason(
    x: Tensor, gate_up: Tensor, gate_up_scales: Tensor | None, down: Tensor, ids: Tensor, **_: object
) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot take these arguments."""
    if gate_up_scales is not None:
        return "npu_grouped_matmul multiplies bf16 by int8 and int4, not by MXFP4; unpack the weights"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"{ACTIVATION} takes bfloat16 and float16, got {dtype_name(x)}"
    return experts_torch_npu.reason(x, gate_up, down, ids) or _torch_npu.missing(ACTIVATION, interleaved=True)


def experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    weights: Tensor,
    ids: Tensor,
    alpha: float,
    limit: float,
    **_: Any,
) -> Tensor:
    # Biases of bf16 products are fp32, as npu_grouped_matmul demands.
    dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype

    def product(rows: Tensor, weight: tuple[Tensor, Tensor], counts: Tensor) -> Tensor:
        return grouped_product(rows, weight[0].mT, counts, bias=[weight[1].to(dtype)])

    def activate(both: Tensor) -> Tensor:
        options = {"alpha": alpha, "limit": limit, "bias": 1.0, "interleaved": True}
        return _torch_npu.call(ACTIVATION, x=both, dim=-1, **options)  # type: ignore[no-any-return]

    stacks = (gate_up, gate_up_bias), (down, down_bias)
    return run_routed(x, weights, ids, gate_up.shape[0], product, *stacks, activate=activate)
