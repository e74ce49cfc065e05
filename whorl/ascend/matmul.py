"""Grouped products."""

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """A product for each group, sums in fp32, one rounding. No gradient: torch_npu drops it silently.

    group_type -1: x[i] @ weight[i]; 0: group e of the rows of x, [rows, K], times weight[e], in one tensor [E, K, N] or
    a list; 2: x [M, rows] times weight [rows, N] for each group of rows, [E, M, N]. group_list: where groups end
    (group_list_type 0) or how long they are (1). split_item 0 and 1 give a tensor for each group, 2 and 3 one. bias:
    [N] for each. Off the NPU quantisation and activations are refused by name.
    """
    name = "npu_grouped_matmul"
    refuse_gradient(name, *x, *weight, *(bias or ()))
    if is_npu(x[0]):
        return call_torch_npu(
            name,
            x,
            weight,
            bias=bias,
            scale=scale,
            offset=offset,
            antiquant_scale=antiquant_scale,
            antiquant_offset=antiquant_offset,
            per_token_scale=per_token_scale,
            group_list=group_list,
            activation_input=activation_input,
            activation_quant_scale=activation_quant_scale,
            activation_quant_offset=activation_quant_offset,
            split_item=split_item,
            group_type=group_type,
            group_list_type=group_list_type,
            act_type=act_type,
            tuning_config=tuning_config,
            output_dtype=output_dtype,
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            scale_dtype=scale_dtype,
            per_token_scale_dtype=per_token_scale_dtype,
        )
    sizes = {"split_item": split_item or 0, "group_list_type": group_list_type or 0, "act_type": act_type or 0}
    refuse(
        name,
        contracts.grouped_matmul_limit(
            shapes=[t.shape for t in x],
            weight_shapes=[t.shape for t in weight],
            dtype=dtype_name(x[0]),
            weight_dtype=dtype_name(weight[0]),
            groups=None if group_list is None else group_list.numel(),
            group_type=group_type,
            **sizes,
        )
        if scale is None and antiquant_scale is None
        else None,
    )
    refuse_arguments(
        name,
        scale=scale,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        act_type=act_type or None,
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        scale_dtype=scale_dtype,
        per_token_scale_dtype=per_token_scale_dtype,
    )
    pairs = list(_pairs(name, x, weight, group_type, _lengths(group_list, sizes["group_list_type"])))
    found = [_product(a, b, None if bias is None else _bias(bias, e)) for e, (a, b) in enumerate(pairs)]
    found = [y.to(_dtype(name, output_dtype) or x[0].dtype) for y in found]
    if sizes["split_item"] in (0, 1):
        return found
    return [torch.stack(found) if group_type == 2 else torch.cat(found)]


def _lengths(group_list: Tensor | None, kind: int) -> list[int] | None:
    if group_list is None:
        return None
    return (group_list if kind == 1 else group_list.diff(prepend=group_list.new_zeros(1))).tolist()


def _pairs(
    name: str, x: list[Tensor], weight: list[Tensor], group_type: int | None, lengths: list[int] | None
) -> list[tuple[Tensor, Tensor]]:
    """What is multiplied by what."""
    if group_type not in (-1, 0, 2):
        raise ValueError(f"{name}: group_type is {group_type}, expected -1, 0 or 2")
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    if len(x) == 1 and group_type != -1:
        total = x[0].shape[1 if group_type == 2 else 0]
        if lengths is None or sum(lengths) != total:
            raise ValueError(f"{name}: group_list is of {lengths}, expected lengths that add up to {total}")
        x = list(x[0].split(lengths, 1 if group_type == 2 else 0))
        if group_type == 2:
            weights = list(weight[0].split(lengths))
    if len(x) != len(weights):
        raise ValueError(f"{name}: {len(x)} groups of x and {len(weights)} weights")
    return list(zip(x, weights, strict=True))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide)
    return y if bias is None else y + bias.to(wide)


def _bias(bias: list[Tensor], group: int) -> Tensor:
    """A tensor [N] for each group, or one tensor [E, N]."""
    return bias[0][group] if bias[0].dim() == 2 else bias[group]


def _dtype(name: str, output_dtype: object) -> torch.dtype | None:
    if output_dtype is None or isinstance(output_dtype, torch.dtype):
        return output_dtype
    raise ValueError(f"{name}: output_dtype is {output_dtype}; off the NPU give a torch.dtype or None")
