"""Packed weights on Ascend: 4 bits or int8 with one scale per row or group.

The device promises neither that values are rounded to x's dtype before they are multiplied, nor the order of sums, nor
that a token's bits are independent of the batch. None of this has run on a device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from whorl.contracts import antiquant_grouped_matmul_limit, moe_init_routing_limit, weight_quant_matmul_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from ..moe.experts_torch_npu import grouped_product, run_routed
from .layout import Weight, expert_weights, find

WEIGHTS = {"bytes": "int8", "int4_paired": "int4"}  # by layout, torch_npu's name of the weight's dtype
_OFFSETS = WeakTensorKeyDictionary()  # by zero points


def _layout_reason(codes: Tensor, rows: int, layout: str) -> str | None:
    """Return why torch_npu cannot read these codes: tiled layouts are those of Nvidia's tensor cores."""
    if layout not in WEIGHTS:
        return f"reads the layouts {' and '.join(WEIGHTS)}, got {layout}"
    if codes.dtype not in (torch.int8, torch.uint8):
        return f"multiplies by int8 and int4, got {codes.dtype}"
    return None if rows == 1 else f"takes one scale per row, got one for {rows} rows"


def weight_reason(
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    scales: Tensor,
    zeros: Tensor | None,
    columns: int,
    tokens: int = 1,
) -> str | None:
    """Return None, or the reason that torch_npu cannot multiply by a weight.

    shape: [N, K], or [E, N, K] of experts; dtype: of the activations, of which there are `tokens`; scales, zeros and
    columns: as in `packed_linear`.
    """
    *stack, height, length = shape
    names = {"dtype": _name(dtype), "weight_dtype": WEIGHTS[layout], "scale_dtype": _name(scales.dtype)}
    group, weight_shape = _group(columns, length), (*stack, length, height)
    if stack:
        is_symmetric = zeros is None
        return antiquant_grouped_matmul_limit(weight_shape=weight_shape, group=group, symmetric=is_symmetric, **names)
    return weight_quant_matmul_limit(shape=(tokens, length), weight_shape=weight_shape, group=group, **names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _group(columns: int, length: int) -> int:
    """Return the columns per scale as torch_npu counts them: 0 where a whole row shares one."""
    return 0 if columns >= length else columns


def reason(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: int,
    columns: int,
    layout: str,
    **_: object,
) -> str | None:
    """Return None, or the reason that npu_weight_quant_batchmatmul cannot compute `packed_linear`."""
    count, length = x.shape
    return _layout_reason(codes, rows, layout) or weight_reason(
        (find(layout).num_rows(codes), length), layout, x.dtype, scales, zeros, columns, count
    )


def linear(x: Tensor, bias: Tensor | None, **packed: Any) -> Tensor:
    weight = Weight(**packed)
    y: Tensor = _torch_npu.call(
        "npu_weight_quant_batchmatmul",
        x=x.contiguous(),
        weight=_weight(weight.codes, weight.layout),
        antiquant_scale=weight.scales.mT.contiguous(),
        antiquant_offset=None if weight.zeros is None else _offset(weight.zeros, x.dtype),
        bias=None if bias is None else bias.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype).contiguous(),
        antiquant_group_size=_group(weight.columns, x.shape[1]),
        inner_precise=0,
    )
    return y


def _weight(codes: Tensor, layout: str) -> Tensor:
    """Return codes as a weight of torch_npu: int8 [.., K, N], or int32 [.., K, N / 8] with eight 4-bit codes each.

    int8 is a transposed view; 4-bit codes that are laid out for Ascend are not copied either.
    """
    return codes.mT if layout == "bytes" else codes.mT.contiguous().view(torch.int32)


def _offset(zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that torch_npu adds to codes, [.., groups, N]; they are computed once for a weight."""
    if zeros not in _OFFSETS:
        _OFFSETS[zeros] = (-zeros).to(dtype).mT.contiguous()
    return _OFFSETS[zeros]


@functools.lru_cache(maxsize=64)
def no_offset(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, which npu_grouped_matmul needs for symmetric weights; all layers of a model share them."""
    return torch.zeros(shape, dtype=dtype, device=device)


def experts_reason(x: Tensor, ids: Tensor, weights: Tensor, **packed: Any) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot compute `packed_experts`."""
    if not ids.numel():
        return "empty tensors are not taken"
    gate_up, down = expert_weights(**packed)
    layout, count, width = gate_up.layout, len(gate_up.codes), x.shape[1]
    inner = find(layout).num_rows(gate_up.codes) // 2
    refusal = _layout_reason(gate_up.codes, gate_up.rows, layout)
    refusal = refusal or moe_init_routing_limit(shape=x.shape, dtype=dtype_name(x), ids_dtype="int32", expert_num=count)
    for size, part in (((count, 2 * inner, width), gate_up), ((count, width, inner), down)):
        refusal = refusal or weight_reason(size, layout, x.dtype, part.scales, part.zeros, part.columns)
    return refusal


def experts(x: Tensor, weights: Tensor, ids: Tensor, **packed: Any) -> Tensor:
    gate_up, down = expert_weights(**packed)
    return run_routed(x, weights, ids, len(gate_up.codes), _grouped_product, gate_up, down)


def _grouped_product(rows: Tensor, weight: Weight, counts: Tensor) -> Tensor:
    """Return rows @ values[e].T for the counts[e] rows of each expert e."""
    scales, zeros = weight.scales.mT.contiguous(), weight.zeros
    offset = no_offset(scales.shape, scales.dtype, scales.device) if zeros is None else _offset(zeros, scales.dtype)
    if scales.shape[1] == 1:  # one scale per row is [E, N], groups are [E, groups, N]
        scales, offset = scales.squeeze(1), offset.squeeze(1)
    codes = _weight(weight.codes, weight.layout)
    return grouped_product(rows, codes, counts, antiquant_scale=[scales], antiquant_offset=[offset])
