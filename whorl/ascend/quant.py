"""Quantisation."""

import torch
from torch import Tensor

from whorl import contracts, ops
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient

# What a dst_type means: a dtype, or its number, which is all that torch_npu's schema knows.
_FORMATS = {None: "int8", torch.int8: "int8", 1: "int8", torch.quint4x2: "quint4x2", 16: "quint4x2"}
_PACKED = 8  # int4 codes in one int32


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Symmetric int8 or int4 with a scale for each row: y = round(input / scale), scale = largest magnitude / 127 or 7.

    input: [..., C], times smooth_scales [C] first, or, with group_index, times smooth_scales[g] for the rows from
    group_index[g - 1] to group_index[g]. Returns y like input in int8, or, dst_type torch.quint4x2, [..., C / 8] int32
    with the first of eight codes in the lowest bits; and scale [...] fp32. No gradient. Off the NPU other types and
    modes are refused by name.
    """
    name = "npu_dynamic_quant"
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
    form = _FORMATS.get(dst_type)
    limit = contracts.dynamic_quant_limit(shape=input.shape, dtype=dtype_name(input), format=form or str(dst_type))
    refuse(name, limit)
    refuse_arguments(
        name,
        dst_type=dst_type if form is None else None,
        quant_mode=None if quant_mode == "pertoken" else quant_mode,
        dst_type_max=dst_type_max or None,
    )
    if smooth_scales is not None:
        input = input.float() * _smooth(name, input, smooth_scales, group_index)
    return ops.dynamic_quant(input) if form == "int8" else _int4(name, input)


def _int4(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of -7 to 7, eight to an int32; a row without a usable scale has codes 0, as in `ops.dynamic_quant`."""
    if x.shape[-1] % _PACKED:
        raise ValueError(f"{name}: input is {list(x.shape)}, expected a last dim that is a multiple of {_PACKED}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / wide.new_full((1,), 7.0)
    codes = torch.where((scale > 0) & (scale < torch.inf), wide / scale, 0.0).round().clamp(-7, 7).to(torch.int32)
    nibbles = (codes & 15).unflatten(-1, (-1, _PACKED)) << torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)
    return nibbles.sum(-1, dtype=torch.int64).to(torch.int32), scale.squeeze(-1)


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
