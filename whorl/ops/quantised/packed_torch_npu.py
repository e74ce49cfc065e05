"""Packed weights on Ascend: int8 with one scale per row or group.

The device does not promise that a token's bits are independent of the batch.
"""

import torch
from torch import Tensor

from whorl.contracts import antiquant_grouped_matmul_limit, moe_init_routing_limit, weight_quant_matmul_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from ..moe.routing_torch_npu import run_routed_experts


def _layout_reason(codes: Tensor, rows: int, tiled: bool) -> str | None:
    """Return why torch_npu cannot read these codes: tiled and 4-bit codes are in the order of Nvidia's tensor cores."""
    if codes.dtype != torch.int8 or tiled:
        return f"takes int8 that is not tiled, got {codes.dtype}{', tiled' if tiled else ''}"
    return None if rows == 1 else f"takes one scale per row, got one for {rows} rows"


def reason(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, rows: int, columns: int, tiled: bool, **_: object
) -> str | None:
    """Return None, or the reason that npu_weight_quant_batchmatmul cannot compute `packed_linear`."""
    return _layout_reason(codes, rows, tiled) or weight_quant_matmul_limit(
        shape=x.shape,
        weight_shape=codes.shape[::-1],
        dtype=dtype_name(x),
        weight_dtype=dtype_name(codes),
        scale_dtype=dtype_name(scales),
        group=_group(columns, x.shape[1]),
    )


def _group(columns: int, length: int) -> int:
    """Return the columns per scale as torch_npu counts them: 0 where a whole row shares one."""
    return 0 if columns >= length else columns


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    rows: int,
    columns: int,
    tiled: bool,
) -> Tensor:
    y: Tensor = _torch_npu.call(
        "npu_weight_quant_batchmatmul",
        x=x.contiguous(),
        weight=codes.t(),
        antiquant_scale=scales.t().contiguous(),
        antiquant_offset=None if zeros is None else (-zeros).to(x.dtype).t().contiguous(),  # torch_npu adds the offset
        bias=None if bias is None else bias.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype).contiguous(),
        antiquant_group_size=_group(columns, x.shape[1]),
    )
    return y


def experts_reason(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    ids: Tensor,
    rows: int,
    tiled: bool,
    **_: object,
) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot compute `packed_experts`."""
    if not ids.numel():
        return "empty tensors are not taken"
    count, dtype = gate_up.shape[0], dtype_name(x)
    refusal = _layout_reason(gate_up, rows, tiled)
    refusal = refusal or moe_init_routing_limit(shape=x.shape, dtype=dtype, ids_dtype="int32", expert_num=count)
    for codes, scales in ((gate_up, gate_up_scales), (down, down_scales)):
        refusal = refusal or antiquant_grouped_matmul_limit(
            weight_shape=(count, codes.shape[2], codes.shape[1]),
            dtype=dtype,
            weight_dtype=dtype_name(codes),
            scale_shape=scales.shape,
            scale_dtype=dtype_name(scales),
        )
    return refusal


def experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    rows: int,
    columns: int,
    tiled: bool,
) -> Tensor:
    def product(sorted_rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, counts: Tensor) -> Tensor:
        offset = torch.zeros_like(scales) if zeros is None else (-zeros).to(x.dtype)
        (y,) = _torch_npu.call(
            "npu_grouped_matmul",
            x=[sorted_rows],
            weight=[codes.transpose(1, 2)],
            antiquant_scale=[scales.squeeze(-1).contiguous()],
            antiquant_offset=[offset.squeeze(-1).contiguous()],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            act_type=0,
        )
        return y  # type: ignore[no-any-return]

    def run_experts(sorted_rows: Tensor, counts: Tensor) -> Tensor:
        gate_and_up = product(sorted_rows, gate_up, gate_up_scales, gate_up_zeros, counts)
        hidden = _torch_npu.call("npu_swiglu", input=gate_and_up, dim=-1)
        return product(hidden, down, down_scales, down_zeros, counts)

    return run_routed_experts(x, weights, ids, gate_up.shape[0], run_experts)
