"""Tokens to their experts and back, on Ascend. Nothing is read back to the host."""

from collections.abc import Callable

from torch import Tensor

from .. import _torch_npu


def routed(x: Tensor, weights: Tensor, ids: Tensor, count: int, network: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The weighted sum of what `network` makes of each token's rows, sorted by expert, and the experts' counts."""
    sorted_rows, where, counts, _ = _torch_npu.call(
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
    y = _torch_npu.call(
        "npu_moe_finalize_routing",
        expanded_permuted_rows=network(sorted_rows, counts).float(),  # weights are fp32, and must have their dtype
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights.float().contiguous(),
        expanded_src_to_dst_row=where.view(ids.shape).t().reshape(-1),  # column by column
        export_for_source_row=None,
        drop_pad_mode=0,
    )
    return y.to(x.dtype).contiguous()  # type: ignore[no-any-return]
