"""The scores by which the lightning indexer ranks the keys of each query in DeepSeek sparse attention."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from .._op import Values, operator
from ..rope import rope
from .bounds import Bound, Positions, check_bounds, chunks, visible_keys, wide_dtype

# Statements of the indexer's tensors, which its operators share.
Queries = Annotated[Tensor, "[T, HI, D] float or fp8"]
Keys = Annotated[Tensor, "[S, D] q"]
Weights = Annotated[Tensor, "[T, HI] bf16 or fp16 or fp32"]
KeyScale = Annotated[Tensor | None, "[S] bf16 or fp16 or fp32"]


def indexer_rope(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to the first R channels of the indexer's queries [T, HI, D] and its one key head [T, D].

    cos_sin and positions are those of `rope`. Channel i is paired with i + R/2, as in the indexer of DeepSeek-V3.2
    (its attention pairs neighbouring channels, at the end of the head), or, with `interleaved`, 2i with 2i + 1, as in
    GLM's indexer. Returns q and k, rotated.

        q, k = ops.indexer_rope(q, k, cos_sin, positions)
    """
    rotated_q, rotated_k = rope(q, k.unsqueeze(-2), cos_sin, positions, style="pairs" if interleaved else "half")
    return rotated_q, rotated_k.squeeze(-2)


def scoring_flops(values: Values) -> int:
    """Count the operations of the pairs that the default bounds show; explicit bounds may show fewer."""
    num_queries, heads, dim = values["q"].shape
    first = values["k"].shape[0] - num_queries + 1
    return 2 * heads * dim * sum(max(0, first + t) for t in range(num_queries))


@operator(
    check=partial(check_bounds, "index_scores"),
    forward_only=True,
    without={"torch_npu": "npu_lightning_indexer returns only the scores of the selected keys"},
    flops=scoring_flops,
)
def index_scores(
    q: Queries,
    k: Keys,
    weights: Weights,
    starts: Bound = None,
    ends: Bound = None,
    key_positions: Positions = None,
    k_scale: KeyScale = None,
) -> Annotated[Tensor, "[T, S] fp32"]:
    """Score keys: scores[t, s] = sum over heads h of weights[t, h] * max(0, q[t, h] . k[s]), 0 where t does not see s.

    k_scale: by which the scores of a key are multiplied last (for fp8 keys). Query t sees the keys s with starts[t] <=
    key_positions[s] < ends[t]; key_positions defaults to 0, 1, ..., and the bounds to causal ones with the last query
    at the last key. Products and sums are in fp32, those of fp8 in the device's accumulator (14 bits on Hopper). A
    constant factor (HI^-0.5 * D^-0.5) belongs in the weights. For fp8 scores quantise q and k with `dynamic_quant`,
    multiply the weights by q's scales and pass k's scales as k_scale. No gradient: `indexer_kl_loss` trains the
    indexer.

        scores = ops.index_scores(q, k, weights)
    """
    wide, keys, factors = (x.to(wide_dtype(q)) for x in (q, k, weights))
    scores = torch.empty(q.shape[0], k.shape[0], dtype=wide.dtype, device=q.device)
    for rows in chunks(q.shape[0], q.shape[1] * k.shape[0]):
        dots = torch.einsum("thd,sd->ths", wide[rows], keys).relu_()
        scores[rows] = torch.einsum("ths,th->ts", dots, factors[rows])
    if k_scale is not None:
        scores = scores * k_scale.to(scores.dtype)
    visible = visible_keys(q.shape[0], k.shape[0], starts, ends, key_positions, q.device)
    return scores.masked_fill(~visible, 0.0)


def triton_reason(q: Tensor, **_: object) -> str | None:
    """Return None, or the reason that the indexer's Triton kernels cannot take these queries."""
    if q.shape[1] > 128 or q.shape[2] > 256:
        return f"{q.shape[1]} heads of {q.shape[2]} channels do not fit one program (128 of 256)"
    return None


index_scores.impl("triton", "scores_triton:index_scores", accepts=triton_reason)
