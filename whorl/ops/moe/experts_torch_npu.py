"""Experts on Ascend: permute, grouped product, SwiGLU, grouped product, weighted sum.

No value is read back to the host. The device does not promise that a token's bits are independent of the batch.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from whorl.contracts import grouped_matmul_limit, moe_init_routing_limit

from .. import _torch_npu
from .._torch_npu import dtype_name


def reason(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, **_: object) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot take these arguments."""
    count, rows = gate_up.shape[0], ids.numel()
    if not rows:
        return "empty tensors are not taken"
    routing = moe_init_routing_limit(shape=x.shape, dtype=dtype_name(x), ids_dtype="int32", expert_num=count)
    return routing or _product_reason(x, rows, gate_up) or _product_reason(x, rows, down)


def _product_reason(x: Tensor, rows: int, weight: Tensor) -> str | None:
    """Return None, or the reason that npu_grouped_matmul cannot multiply `rows` rows by this weight [E, N, K]."""
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
    def product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return grouped_product(rows, weight.mT, counts)

    return run_routed(x, weights, ids, gate_up.shape[0], product, gate_up, down)


def run_routed(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_experts: int,
    product: Callable[[Tensor, Any, Tensor], Tensor],
    gate_up: Any,
    down: Any,
    *,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run experts on the tokens sorted by expert, and return each token's weighted sum.

    product(rows, weight, counts) returns the product of the rows, counts[e] of each expert e, and gate_up or down.
    activate: between the two products; None: npu_swiglu.
    """
    sorted_rows, positions, counts, _ = _torch_npu.call(
        "npu_moe_init_routing_v2",
        x=x.contiguous(),
        expert_idx=ids.int().contiguous(),
        active_num=ids.numel(),
        expert_num=num_experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, num_experts],
        row_idx_type=0,
    )
    both = product(sorted_rows, gate_up, counts)
    hidden = _torch_npu.call("npu_swiglu", input=both, dim=-1) if activate is None else activate(both)
    y = _torch_npu.call(
        "npu_moe_finalize_routing",
        expanded_permuted_rows=product(hidden, down, counts).float(),  # must share the fp32 of the weights
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights.float().contiguous(),
        expanded_src_to_dst_row=positions.view(ids.shape).t().reshape(-1),  # the operator expects choice-major order
        export_for_source_row=None,
        drop_pad_mode=0,
    )
    return y.to(x.dtype).contiguous()  # type: ignore[no-any-return]


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor, **options: Any) -> Tensor:
    """Return rows @ weight[e] for the counts[e] rows of each expert e. options: scales of the rows and the weight."""
    (y,) = _torch_npu.call(
        "npu_grouped_matmul",
        x=[rows],
        weight=[weight],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
        act_type=0,
        **options,
    )
    return y  # type: ignore[no-any-return]
