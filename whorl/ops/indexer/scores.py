"""The scores by which the lightning indexer ranks the keys of each query in DeepSeek sparse attention."""

import torch
from torch import Tensor

from .._op import Values, operator
from ..rope import rope
from .bounds import check_bounds, chunks, visible_keys, wide_dtype


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


def check_indexer(name: str, q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None = None) -> None:
    """Raise ValueError unless the indexer's tensors have the shapes and dtypes of `index_scores`."""
    if q.dim() != 3 or not q.is_floating_point():
        raise ValueError(f"{name}: q is {list(q.shape)} {q.dtype}, expected [T, HI, D] floating point")
    if k.dim() != 2 or k.shape[1] != q.shape[2] or k.dtype != q.dtype:
        raise ValueError(f"{name}: k is {list(k.shape)} {k.dtype}, expected [S, {q.shape[2]}] {q.dtype}")
    if weights.shape != q.shape[:2] or not weights.is_floating_point():
        raise ValueError(f"{name}: weights is {list(weights.shape)} {weights.dtype}, expected {list(q.shape[:2])}")
    if k_scale is not None and (k_scale.shape != k.shape[:1] or not k_scale.is_floating_point()):
        raise ValueError(f"{name}: k_scale is {list(k_scale.shape)} {k_scale.dtype}, expected [{k.shape[0]}]")


def _check_scores(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, **bounds: Tensor | None) -> None:
    check_indexer("index_scores", q, k, weights, k_scale)
    check_bounds("index_scores", q.shape[0], k.shape[0], **bounds)


def _fake_scores(q: Tensor, k: Tensor, **_: object) -> Tensor:
    return q.new_empty(q.shape[0], k.shape[0], dtype=wide_dtype(q))


def scoring_flops(values: Values) -> int:
    """Count the operations of the pairs that the default bounds show; explicit bounds may show fewer."""
    num_queries, heads, dim = values["q"].shape
    first = values["k"].shape[0] - num_queries + 1
    return 2 * heads * dim * sum(max(0, first + t) for t in range(num_queries))


@operator(
    check=_check_scores,
    forward_only=True,
    without={"torch_npu": "npu_lightning_indexer returns only the scores of the selected keys"},
    fake=_fake_scores,
    flops=scoring_flops,
)
def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """Score keys: scores[t, s] = sum over heads h of weights[t, h] * max(0, q[t, h] . k[s]), 0 where t does not see s.

    q: [T, HI, D] and k: [S, D], both bf16, fp16, fp32 or float8_e4m3fn; weights: [T, HI] floating point; k_scale: [S],
    by which the scores of a key are multiplied last (for fp8 keys); scores: [T, S] fp32. Query t sees the keys s with
    starts[t] <= key_positions[s] < ends[t], all int32; key_positions defaults to 0, 1, ..., and the bounds to causal
    ones with the last query at the last key. Products and sums are in fp32, those of fp8 in the device's accumulator
    (14 bits on Hopper). A constant factor (HI^-0.5 * D^-0.5) belongs in the weights. For fp8 scores quantise q and k
    with `dynamic_quant`, multiply the weights by q's scales and pass k's scales as k_scale. No gradient:
    `indexer_kl_loss` trains the indexer. Raises ValueError when shapes, dtypes or bounds do not fit.

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
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    if q.shape[1] > 128 or q.shape[2] > 256:
        return f"{q.shape[1]} heads of {q.shape[2]} channels do not fit one program (128 of 256)"
    return None


index_scores.impl("triton", "scores_triton:index_scores", accepts=triton_reason)
