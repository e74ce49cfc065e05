"""Routing on Ascend with torch_npu's gating operators. No value is read back to the host."""

from torch import Tensor

from whorl.contracts import moe_gating_top_k_limit, moe_gating_top_k_softmax_limit

from .. import _torch_npu


def _is_plain(bias: Tensor | None, scoring: str, num_groups: int) -> bool:
    """Return whether npu_moe_gating_top_k_softmax computes this; else npu_moe_gating_top_k does."""
    return bias is None and scoring == "softmax" and num_groups == 1


def reason(logits: Tensor, k: int, bias: Tensor | None, scoring: str, num_groups: int, **_: object) -> str | None:
    """Return None, or the reason that torch_npu's gating operator cannot take these arguments."""
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
    """Route with fp32 logits, because torch_npu returns the weights in the dtype of the logits."""
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
        if is_raw:  # the operator always renormalises sigmoid weights (and only those), so gather the raw scores
            weights = scores.gather(-1, ids.long())
    if renormalize and scoring == "softmax":
        weights = weights / _sum(weights).clamp_min(1e-20)
    return (weights * scale).contiguous(), ids.contiguous()


def _sum(weights: Tensor) -> Tensor:
    """Return the sum of each row, [T, 1]."""
    reduce = _torch_npu.batch_invariant("npu_reduce_sum")
    total: Tensor = weights.sum(-1, keepdim=True) if reduce is None else reduce(weights, -1, True)
    return total
