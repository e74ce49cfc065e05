"""npu_grouped_matmul: one matmul for each group of rows, or for each pair of two lists."""

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import dtype_name

from .calling import Misfit, operator


@operator(
    contracts.grouped_matmul_limit,
    no_gradient="x weight bias",
    npu_only="scale offset antiquant_scale antiquant_offset per_token_scale activation_input activation_quant_scale "
    "activation_quant_offset act_type x_dtype weight_dtype scale_dtype per_token_scale_dtype",
    choices={"group_type": (-1, 0, 2)},
    shapes=lambda call: [t.shape for t in call["x"]],
    weight_shapes=lambda call: [t.shape for t in call["weight"]],
    weight_dtype=lambda call: dtype_name(call["weight"][0]),
    groups=lambda call: None if call["group_list"] is None else call["group_list"].numel(),
)
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
    """Return one matmul per group, accumulated in fp32 and rounded once.

    group_type -1: x[i] @ weight[i]; 0: the rows of x [rows, K] that belong to group e, times weight[e], from one tensor
    [E, K, N] or a list; 2: x [M, rows] times weight [rows, N] for each group of rows, [E, M, N]. group_list: the
    cumulative number of rows (group_list_type 0) or the rows of each group (1). split_item 0 and 1 return a tensor per
    group, 2 and 3 one tensor in a list. bias: [N] per group. Raises RuntimeError when a gradient is needed (torch_npu
    drops it silently), and ValueError when groups and weights do not fit. Off the NPU the arguments of quantisation and
    activations raise ValueError.

    Example: (y,) = npu_grouped_matmul([x], [weight], group_list=ends, group_type=0, split_item=3)
    """
    operands = list(_operands(x, weight, group_type, _group_lengths(group_list, group_list_type)))
    outputs = [_matmul(a, b, None if bias is None else _group_bias(bias, e)) for e, (a, b) in enumerate(operands)]
    outputs = [y.to(_dtype(output_dtype) or x[0].dtype) for y in outputs]
    if split_item in (0, 1):
        return outputs
    return [torch.stack(outputs) if group_type == 2 else torch.cat(outputs)]


def _group_lengths(group_list: Tensor | None, kind: int | None) -> list[int] | None:
    """Return the rows of each group from a cumulative group_list (kind 0) or from counts (1)."""
    if group_list is None:
        return None
    return (group_list if kind == 1 else group_list.diff(prepend=group_list.new_zeros(1))).tolist()


def _operands(
    x: list[Tensor], weight: list[Tensor], group_type: int | None, lengths: list[int] | None
) -> list[tuple[Tensor, Tensor]]:
    """Return the two operands of each group's matmul."""
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    if len(x) == 1 and group_type != -1:
        total = x[0].shape[1 if group_type == 2 else 0]
        if lengths is None or sum(lengths) != total:
            raise Misfit(f"group_list has lengths {lengths}, expected lengths that add up to {total}")
        x = list(x[0].split(lengths, 1 if group_type == 2 else 0))
        if group_type == 2:
            weights = list(weight[0].split(lengths))
    if len(x) != len(weights):
        raise Misfit(f"x has {len(x)} groups, weight has {len(weights)}; expected the same number")
    return list(zip(x, weights, strict=True))


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide)
    return y if bias is None else y + bias.to(wide)


def _group_bias(bias: list[Tensor], group: int) -> Tensor:
    """Return the bias of a group, from a tensor [N] per group or from one tensor [E, N]."""
    return bias[0][group] if bias[0].dim() == 2 else bias[group]


def _dtype(output_dtype: object) -> torch.dtype | None:
    if output_dtype is None or isinstance(output_dtype, torch.dtype):
        return output_dtype
    raise Misfit(f"output_dtype is {output_dtype}; off the NPU give a torch.dtype or None")
