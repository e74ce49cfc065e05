"""Selection of the highest-scoring keys of each query."""

import torch
from torch import Tensor

from .._op import operator
from .bounds import check_bounds, visible_keys

MOST = 8192  # largest topk of the Triton kernel: a quarter of the longest row that one program handles


def check_topk(name: str, topk: int) -> None:
    if topk < 1:
        raise ValueError(f"{name}: topk is {topk}, expected at least 1")


def _check_top_k(scores: Tensor, topk: int, **bounds: Tensor | None) -> None:
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"top_k: scores is {list(scores.shape)} {scores.dtype}, expected [T, S] torch.float32")
    check_topk("top_k", topk)
    check_bounds("top_k", scores.shape[0], scores.shape[1], **bounds)


def _fake_top_k(scores: Tensor, topk: int, **_: object) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], topk)
    return scores.new_empty(shape, dtype=torch.int32), scores.new_empty(shape)


@operator(
    check=_check_top_k,
    forward_only=True,
    without={"torch_npu": "torch_npu has no selection with a rule for ties"},
    fake=_fake_top_k,
)
def top_k(
    scores: Tensor,
    topk: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the `topk` highest visible scores of each query.

    scores: [T, S] fp32; starts, ends and key_positions are those of `index_scores`. Returns indices [T, topk] int32,
    ascending, and the scores at them, [T, topk] fp32. Ties go to the lowest index (0.0 and -0.0 are equal, NaN counts
    as minus infinity), so that every backend selects the same keys. A query that sees fewer than topk keys gets all of
    them, followed by index -1 with score 0. No gradient. Raises ValueError when shapes, dtypes or bounds do not fit.

        indices, values = ops.top_k(scores, 2048)
    """
    num_queries, num_keys = scores.shape
    visible = visible_keys(num_queries, num_keys, starts, ends, key_positions, scores.device)
    comparable = torch.where(scores.isnan(), -torch.inf, scores) + 0.0  # -0.0 becomes 0.0
    order = torch.sort(comparable, dim=-1, descending=True, stable=True).indices
    seen_first = torch.sort((~visible).gather(1, order).byte(), dim=-1, stable=True).indices
    order = order.gather(1, seen_first)[:, :topk]
    is_real = torch.arange(order.shape[1], device=scores.device) < visible.sum(1, keepdim=True)
    order = torch.sort(torch.where(is_real, order, num_keys), dim=-1).values
    values = comparable.gather(1, order.clamp_max(max(0, num_keys - 1))) if num_keys else scores
    indices = torch.where(order < num_keys, order, -1).int()
    values = torch.where(order < num_keys, values, 0.0)
    padding = (0, topk - order.shape[1])
    return torch.nn.functional.pad(indices, padding, value=-1), torch.nn.functional.pad(values, padding)


def topk_limit(topk: int) -> str | None:
    """Return None, or the reason that the Triton kernel cannot select so many keys."""
    return None if topk <= MOST else f"topk {topk} does not fit one program ({MOST})"


def _triton_reason(scores: Tensor, topk: int, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if scores.dtype == torch.float64 else topk_limit(topk)


top_k.impl("triton", "top_k_triton:forward", accepts=_triton_reason)
