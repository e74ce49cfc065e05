"""Permutation of tokens to their experts and back on Ascend. No value is read back to the host."""

from collections.abc import Callable

from torch import Tensor

from .. import _torch_npu


def run_routed_experts(
    x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, run_experts: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Sort the tokens by expert, run `run_experts(rows, counts)` on them, and return each token's weighted sum."""
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
    y = _torch_npu.call(
        "npu_moe_finalize_routing",
        expanded_permuted_rows=run_experts(sorted_rows, counts).float(),  # must share the fp32 of the weights
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights.float().contiguous(),
        expanded_src_to_dst_row=positions.view(ids.shape).t().reshape(-1),  # the operator expects choice-major order
        export_for_source_row=None,
        drop_pad_mode=0,
    )
    return y.to(x.dtype).contiguous()  # type: ignore[no-any-return]
