"""Mixture of experts: which experts each token gets. Indices are int32, as on the device."""

import torch
from torch import Tensor

from whorl import contracts, ops
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax, then the k highest of each row, not renormalised; ties to the lowest id. No gradient, as in torch_npu.

    x: [T, E] or [B, S, E]. Returns the weights in x's dtype, the ids, E in rows that `finished` marks, and
    row_idx[i, j] = j * rows + i.
    """
    name = "npu_moe_gating_top_k_softmax"
    refuse_gradient(name, x)
    if is_npu(x):
        return call_torch_npu(name, x, finished=finished, k=k)
    refuse(name, contracts.moe_gating_top_k_softmax_limit(shape=x.shape, k=k, dtype=dtype_name(x)))
    rows = x.reshape(-1, x.shape[-1])
    weights, ids = ops.route(rows, k, renormalize=False)
    if finished is not None:
        ids = ids.masked_fill(finished.reshape(-1, 1), x.shape[-1])
    numbers = torch.arange(rows.shape[0] * k, dtype=torch.int32, device=x.device).view(k, -1).t().contiguous()
    shape = (*x.shape[:-1], k)
    return weights.to(x.dtype).view(shape), ids.view(shape), numbers.view(shape)


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
    """The k best experts of each row among the k_group best groups; ties to the lowest id.

    x: [T, E]. Scores are softmax (norm_type 0) or sigmoid (1); bias is added for choosing only. A group is as good as
    its best expert (group_select_mode 0) or its best two together (1). Sigmoid's weights, and with `renorm` softmax's,
    are divided by their sum + eps; all are multiplied by routed_scaling_factor. Returns weights in x's dtype, ids, and
    with out_flag the scores in fp32, else zeros. The weights are differentiable in x.
    """
    name = "npu_moe_gating_top_k"
    if is_npu(x):
        return call_torch_npu(
            name,
            x,
            k,
            bias=bias,
            input_ids=input_ids,
            tid2eid=tid2eid,
            k_group=k_group,
            group_count=group_count,
            group_select_mode=group_select_mode,
            renorm=renorm,
            norm_type=norm_type,
            out_flag=out_flag,
            routed_scaling_factor=routed_scaling_factor,
            eps=eps,
        )
    bias_dtype = None if bias is None else dtype_name(bias)
    refuse(
        name,
        contracts.moe_gating_top_k_limit(
            shape=x.shape, dtype=dtype_name(x), bias_dtype=bias_dtype, group_count=group_count, renorm=renorm
        ),
    )
    for what, value in {"group_select_mode": group_select_mode, "norm_type": norm_type, "renorm": renorm}.items():
        if value not in (0, 1):
            raise ValueError(f"{name}: {what} is {value}, expected 0 or 1")
    experts = x.shape[-1]
    if experts % group_count or not 1 <= k_group <= group_count or not 1 <= k <= experts // group_count * k_group:
        raise ValueError(f"{name}: {k} of {experts} experts, {k_group} of {group_count} groups, do not fit")
    refuse_arguments(name, input_ids=input_ids, tid2eid=tid2eid)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scores = torch.sigmoid(wide) if norm_type else torch.softmax(wide, -1)
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().to(wide.dtype)
    ids = _choose(choice.unflatten(-1, (group_count, -1)), k, k_group, group_select_mode)
    weights = scores.gather(-1, ids)
    if norm_type or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    found = scores.detach().float()
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, ids.int(), found if out_flag else torch.zeros_like(found)


def _choose(choice: Tensor, k: int, k_group: int, group_select_mode: int) -> Tensor:
    """Ids of the k highest of choice [T, groups, size] in the best groups."""
    best = choice.topk(min(2, choice.shape[-1]), -1).values.sum(-1) if group_select_mode else choice.amax(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[..., :k_group]
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
    left = choice.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
    return left.sort(dim=-1, descending=True, stable=True).indices[..., :k]
