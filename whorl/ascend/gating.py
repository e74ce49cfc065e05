"""Routers of mixture-of-experts layers: the experts of each token. Ids are int32, as on the device."""

import torch
from torch import Tensor

from whorl import contracts, ops

from .calling import Misfit, operator


@operator(contracts.moe_gating_top_k_softmax_limit, no_gradient="x")
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k highest softmax weights of each token, not renormalised, and their experts.

    x: [T, E] or [B, S, E] logits; finished: [T] or [B, S] bool. Equal weights go to the lowest id. Returns the weights
    in x's dtype, the ids (E for tokens that `finished` marks), and row_idx[i, j] = j * T + i, each [..., k]. Raises
    RuntimeError when a gradient is needed, which torch_npu does not have.

    Example: weights, ids, _ = npu_moe_gating_top_k_softmax(logits, k=8)
    """
    logits = x.reshape(-1, x.shape[-1])
    weights, ids = ops.route(logits, k, renormalize=False)
    if finished is not None:
        ids = ids.masked_fill(finished.reshape(-1, 1), x.shape[-1])
    row_idx = torch.arange(logits.shape[0] * k, dtype=torch.int32, device=x.device).view(k, -1).t().contiguous()
    shape = (*x.shape[:-1], k)
    return weights.to(x.dtype).view(shape), ids.view(shape), row_idx.view(shape)


@operator(
    contracts.moe_gating_top_k_limit,
    npu_only="input_ids tid2eid",
    choices={"group_select_mode": (0, 1), "norm_type": (0, 1), "renorm": (0, 1)},
)
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k best experts of each token among its k_group best groups, and their weights.

    x: [T, E] logits; bias: [E], added to the scores only to choose experts. Scores are softmax (norm_type 0) or sigmoid
    (1); equal scores go to the lowest id. A group is ranked by its best expert (group_select_mode 0) or by the sum of
    its best two (1). Sigmoid weights, and with `renorm` softmax weights, are divided by their sum + eps; all are
    multiplied by routed_scaling_factor. Returns the weights [T, k] in x's dtype, differentiable in x, the ids [T, k]
    int32, and with out_flag the scores [T, E] in fp32, else zeros. Raises ValueError when k, k_group, group_count and E
    do not fit. Off the NPU input_ids and tid2eid raise ValueError.

    Example: weights, ids, _ = npu_moe_gating_top_k(logits, 8, k_group=4, group_count=8, norm_type=1)
    """
    experts = x.shape[-1]
    if experts % group_count or not 1 <= k_group <= group_count or not 1 <= k <= experts // group_count * k_group:
        raise Misfit(
            f"k={k} of {experts} experts with k_group={k_group} of group_count={group_count} do not fit; "
            "expected group_count to divide the experts and k of them in the chosen groups"
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scores = torch.sigmoid(wide) if norm_type else torch.softmax(wide, -1)
    ranking = scores.detach() if bias is None else scores.detach() + bias.detach().to(wide.dtype)
    ids = _choose_experts(ranking.unflatten(-1, (group_count, -1)), k, k_group, group_select_mode)
    weights = scores.gather(-1, ids)
    if norm_type or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    scores_out = scores.detach().float()
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, ids.int(), scores_out if out_flag else torch.zeros_like(scores_out)


def _choose_experts(ranking: Tensor, k: int, k_group: int, group_select_mode: int) -> Tensor:
    """Return the ids of the k highest values of ranking [T, groups, size] inside the k_group best groups."""
    group_scores = ranking.topk(min(2, ranking.shape[-1]), -1).values.sum(-1) if group_select_mode else ranking.amax(-1)
    groups = group_scores.sort(dim=-1, descending=True, stable=True).indices[..., :k_group]
    is_chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, groups, True)
    candidates = ranking.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    return candidates.sort(dim=-1, descending=True, stable=True).indices[..., :k]
