"""Mixture of experts on Ascend: routing, then permute, grouped product, SwiGLU, grouped product, weighted sum.

Nothing is read back to the host. The device does not promise that a row's bits are independent of the other rows.
"""

import torch
from torch import Tensor

from whorl.contracts import (
    grouped_matmul_limit,
    moe_gating_top_k_limit,
    moe_gating_top_k_softmax_limit,
    moe_init_routing_limit,
)

from . import _torch_npu
from ._torch_npu import dtype_name


def _is_plain(bias: Tensor | None, scoring: str, num_groups: int) -> bool:
    return bias is None and scoring == "softmax" and num_groups == 1


def route_reason(logits: Tensor, k: int, bias: Tensor | None, scoring: str, num_groups: int, **_: object) -> str | None:
    if logits.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    if _is_plain(bias, scoring, num_groups):
        return moe_gating_top_k_softmax_limit(shape=logits.shape, k=k, dtype="float32")
    return moe_gating_top_k_limit(shape=logits.shape, dtype="float32", group_count=num_groups)


def route(
    logits: Tensor,
    k: int,
    bias: Tensor | None,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """In fp32, as the weights have the logits' dtype there."""
    wide = logits.float().contiguous()
    if _is_plain(bias, scoring, num_groups):
        weights, ids, _ = _torch_npu.call("npu_moe_gating_top_k_softmax", x=wide, finished=None, k=k)
    else:
        is_raw = scoring == "sigmoid" and not renormalize
        weights, ids, scores = _torch_npu.call(
            "npu_moe_gating_top_k",
            x=wide,
            k=k,
            bias=None if bias is None else bias.float(),
            k_group=top_groups,
            group_count=num_groups,
            group_select_mode=int(bias is not None),
            renorm=0,
            norm_type=int(scoring == "sigmoid"),
            out_flag=is_raw,
            routed_scaling_factor=1.0,
            eps=1e-20,
        )
        if is_raw:  # the operator divides sigmoid's weights by their sum, and only those
            weights = scores.gather(-1, ids.long())
    if renormalize and scoring == "softmax":
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return (weights * scale).contiguous(), ids.contiguous()


def route_backward_reason(logits: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if logits.dtype == torch.float64 else None


def experts_reason(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, **_: object) -> str | None:
    count, rows = gate_up.shape[0], ids.numel()
    if not rows:
        return "empty tensors are not taken"
    routing = moe_init_routing_limit(shape=x.shape, dtype=dtype_name(x), ids_dtype="int32", expert_num=count)
    return routing or _product_reason(x, rows, gate_up) or _product_reason(x, rows, down)


def _product_reason(x: Tensor, rows: int, weight: Tensor) -> str | None:
    return grouped_matmul_limit(
        shapes=[(rows, weight.shape[2])],
        weight_shapes=[(weight.shape[0], weight.shape[2], weight.shape[1])],
        dtype=dtype_name(x),
        weight_dtype=dtype_name(weight),
        groups=weight.shape[0],
        split_item=2,
        group_type=0,
        group_list_type=1,
    )


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    count = gate_up.shape[0]
    rows, where, counts, _ = _torch_npu.call(
        "npu_moe_init_routing_v2",
        x=x.contiguous(),
        expert_idx=ids.int().contiguous(),
        active_num=ids.numel(),
        expert_num=count,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, count],
        row_idx_type=0,
    )
    hidden = _torch_npu.call("npu_swiglu", input=_product(rows, gate_up, counts), dim=-1)
    found = _product(hidden, down, counts)
    y = _torch_npu.call(
        "npu_moe_finalize_routing",
        # In fp32, since the weights are: they must have the rows' dtype.
        expanded_permuted_rows=found.float(),
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights.float().contiguous(),
        expanded_src_to_dst_row=where.view(ids.shape).t().reshape(-1),  # column by column
        export_for_source_row=None,
        drop_pad_mode=0,
    )
    return y.to(x.dtype).contiguous()


def _product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows @ weight[e].T for the counts[e] rows of each expert e; weight: [E, N, K]."""
    (y,) = _torch_npu.call(
        "npu_grouped_matmul",
        x=[rows],
        weight=[weight.transpose(1, 2)],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
        act_type=0,
    )
    return y
