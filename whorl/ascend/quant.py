"""Quantisation."""

import torch
from torch import Tensor

from whorl import contracts, ops
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient

_INT8 = 1  # the number of torch.int8, which torch_npu takes for an int


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with a scale for each row: y = round(input / scale), scale = largest magnitude / 127.

    input: [..., C], times smooth_scales [C] first, or, with group_index, times smooth_scales[g] for the rows from
    group_index[g - 1] to group_index[g]. Returns y like input in int8 and scale [...] fp32. No gradient. Off the NPU
    other types and modes are refused by name.
    """
    name = "npu_dynamic_quant"
    is_int8 = dst_type in (None, _INT8, torch.int8)
    form = "int8" if is_int8 else str(dst_type)
    refuse(name, contracts.dynamic_quant_limit(shape=input.shape, dtype=dtype_name(input), format=form))
    refuse_gradient(name, input)
    if is_npu(input):
        return call_torch_npu(
            name,
            input,
            smooth_scales=smooth_scales,
            group_index=group_index,
            dst_type=dst_type,
            quant_mode=quant_mode,
            dst_type_max=dst_type_max,
        )
    refuse_arguments(
        name,
        dst_type=None if is_int8 else dst_type,
        quant_mode=None if quant_mode == "pertoken" else quant_mode,
        dst_type_max=dst_type_max or None,
    )
    if smooth_scales is not None:
        input = input.float() * _smooth(name, input, smooth_scales, group_index)
    return ops.dynamic_quant(input)


def _smooth(name: str, x: Tensor, scales: Tensor, group_index: Tensor | None) -> Tensor:
    if scales.shape[-1] != x.shape[-1] or scales.dim() != (1 if group_index is None else 2):
        raise ValueError(
            f"{name}: smooth_scales is {list(scales.shape)}, input {list(x.shape)}: expected [C] or [G, C]"
        )
    if group_index is None:
        return scales.float()
    rows = torch.arange(x[..., 0].numel(), device=x.device)
    group = torch.searchsorted(group_index.long(), rows, right=True)
    return scales.float()[group].view(x.shape)
