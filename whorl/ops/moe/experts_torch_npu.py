"""Experts on Ascend: permute, grouped product, SwiGLU, grouped product, weighted sum.

No value is read back to the host. The device does not promise that a token's bits are independent of the batch.
"""

from torch import Tensor

from whorl.contracts import grouped_matmul_limit, moe_init_routing_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from .routing_torch_npu import run_routed_experts


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
    def run_experts(rows: Tensor, counts: Tensor) -> Tensor:
        hidden = _torch_npu.call("npu_swiglu", input=_product(rows, gate_up, counts), dim=-1)
        return _product(hidden, down, counts)

    return run_routed_experts(x, weights, ids, gate_up.shape[0], run_experts)


def _product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return rows @ weight[e].T for the counts[e] rows of each expert e; weight: [E, N, K]."""
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
