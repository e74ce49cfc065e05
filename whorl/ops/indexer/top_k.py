"""Selection of the highest-scoring keys of each query."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from .._op import operator
from .bounds import Bound, Positions, check_bounds, visible_keys

MOST = 8192  # largest topk of the Triton kernel: a quarter of the longest row that one program handles


@operator(
    check=partial(check_bounds, "top_k"),
    forward_only=True,
    without={"torch_npu": "torch_npu has no selection with a rule for ties"},
)
def top_k(
    scores: Annotated[Tensor, "[T, S] fp32 or fp64"],
    topk: Annotated[int, "> 0"],
    starts: Bound = None,
    ends: Bound = None,
    key_positions: Positions = None,
) -> tuple[Annotated[Tensor, "[T, topk] int32"], Annotated[Tensor, "[T, topk] scores"]]:
    """Select the `topk` highest visible scores of each query.

    starts, ends and key_positions are those of `index_scores`. Returns indices, ascending, and the scores at them. Ties
    go to the lowest index (0.0 and -0.0 are equal, NaN counts as minus infinity), so that every backend selects the
    same keys. A query that sees fewer than topk keys gets all of them, followed by index -1 with score 0. No gradient.

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


def topk_limit(topk: int, **_: object) -> str | None:
    """Return None, or the reason that the Triton kernel cannot select so many keys."""
    return None if topk <= MOST else f"topk {topk} does not fit one program ({MOST})"


top_k.impl("triton", "top_k_triton:forward", accepts=topk_limit)
