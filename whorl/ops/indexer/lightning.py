"""The lightning indexer: it selects the keys that each query of DeepSeek sparse attention attends to.

`index_scores` and `top_k` are its two halves; `lightning_indexer` runs them on one chunk of queries at a time, so that
no [T, S] matrix is ever allocated.
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from whorl.contracts import lightning_indexer_limit

from .. import _torch_npu
from .._op import operator
from .._torch_npu import dtype_name
from .bounds import Bound, Positions, check_bounds, chunks, full_bounds, wide_dtype
from .scores import Keys, KeyScale, Queries, Weights, index_scores, scoring_flops, triton_reason
from .top_k import top_k, topk_limit


@operator(
    check=partial(check_bounds, "lightning_indexer"),
    forward_only=True,
    absent={1: "with_scores"},
    flops=scoring_flops,
)
def lightning_indexer(
    q: Queries,
    k: Keys,
    weights: Weights,
    topk: Annotated[int, "> 0"],
    starts: Bound = None,
    ends: Bound = None,
    key_positions: Positions = None,
    k_scale: KeyScale = None,
    with_scores: bool = True,
) -> tuple[Annotated[Tensor, "[T, topk] int32"], Annotated[Tensor | None, "[T, topk] fp32"]]:
    """Select for each query the `topk` keys with the highest scores: `top_k` of `index_scores`, in chunks of queries.

    score[t, s] = sum over heads h of weights[t, h] * max(0, q[t, h] . k[s]), times k_scale[s], for fp8 keys. Query t
    sees the keys s with starts[t] <= key_positions[s] < ends[t]; key_positions defaults to 0, 1, ..., and the bounds to
    causal ones with the last query at the last key. `causal_bounds` makes bounds for packed sequences and for slices of
    a longer one.

    Returns indices, rows of k, ascending, -1 after the last, and their scores. Ties go to the lowest row, so keys that
    were gathered should be in the order of their positions. Only the scores of one chunk of queries are in memory. With
    with_scores=False the scores are None; this saves work on Ascend, whose kernel rounds them to q's dtype, so that
    plain torch computes them again. No gradient.

        indices, _ = ops.lightning_indexer(q, k, weights, topk=2048, with_scores=False)
    """
    selections = []
    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    for rows in chunks(q.shape[0], k.shape[0]):
        bounds = (starts[rows], ends[rows], key_positions)
        scores = index_scores.reference(q[rows], k, weights[rows], *bounds, k_scale)
        selections.append(top_k.reference(scores, topk, *bounds))
    indices = [q.new_empty(0, topk, dtype=torch.int32), *(i for i, _ in selections)]
    values = [q.new_empty(0, topk, dtype=wide_dtype(q)), *(v for _, v in selections)]
    return torch.cat(indices), torch.cat(values) if with_scores else None


def _triton_reason(q: Tensor, topk: int, **_: object) -> str | None:
    return triton_reason(q) or topk_limit(topk)


lightning_indexer.impl("triton", "scores_triton:lightning_indexer", accepts=_triton_reason)


def _npu_reason(q: Tensor, k: Tensor, topk: int, **arguments: Any) -> str | None:
    if not q.numel() or not k.numel():
        return "empty tensors are not taken"
    if any(arguments[name] is not None for name in ("ends", "key_positions", "k_scale")):
        return "attends to all keys up to the query's own; bounds, positions and scales are not taken"
    return lightning_indexer_limit(
        query_shape=q.shape,
        key_shape=(k.shape[0], 1, k.shape[1]),
        dtype=dtype_name(q),
        sparse_count=topk,
        sparse_mode=3,
    )


@lightning_indexer.impl("torch_npu", accepts=_npu_reason)
def _(q, k, weights, topk, starts, ends, key_positions, k_scale, with_scores):  # type: ignore[no-untyped-def]
    """Run torch_npu's indexer and sort its indices: it documents neither their order nor a rule for ties."""
    unsorted, _ = _torch_npu.call(
        "npu_lightning_indexer",
        query=q.unsqueeze(0).contiguous(),
        key=k[None, :, None].contiguous(),
        weights=weights.unsqueeze(0).to(q.dtype).contiguous(),
        sparse_count=topk,
        sparse_mode=3,
    )
    indices = torch.where(unsorted[0, :, 0] < 0, k.shape[0], unsorted[0, :, 0]).sort(-1).values
    indices = torch.where(indices < k.shape[0], indices, -1).int()
    if not with_scores:
        return indices, None
    values = q.new_empty(indices.shape, dtype=torch.float32)
    for rows in chunks(q.shape[0], topk * (q.shape[1] + q.shape[2])):  # torch_npu rounds its scores to q's dtype
        keys = k[indices[rows].clamp_min(0).long()].float()
        dots = torch.einsum("thd,tkd->thk", q[rows].float(), keys).relu()
        values[rows] = torch.einsum("thk,th->tk", dots, weights[rows].float())
    return indices, values.masked_fill(indices < 0, 0.0)
