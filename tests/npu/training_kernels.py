"""The vendor's attention of training, forward and backward, in plain torch. See kernels.py."""

from typing import Any

import torch
from attention_kernels import UNLIMITED, hidden_keys
from torch import Tensor


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, mode: int) -> Tensor:
    """[B, N, S, K] fp32, minus infinity where a key is hidden."""
    queries, keys = query.shape[1], key.shape[1]
    group = query.shape[2] // key.shape[2]
    hidden = hidden_keys(queries, keys, mode, mask, UNLIMITED, UNLIMITED, is_single=False)
    found = torch.einsum("bsnd,btnd->bnst", query.float(), key.float().repeat_interleave(group, 2)) * scale
    return found.masked_fill(hidden, -torch.inf)


def _check(tensors: tuple[Tensor, ...], head_num: int, input_layout: str, keep_prob: float, mode: int) -> None:
    assert input_layout == "BSND", input_layout
    assert head_num == tensors[0].shape[2]
    assert (keep_prob, mode) == (1.0, 3)
    assert all(x.is_contiguous() and x.dtype == tensors[0].dtype for x in tensors)


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    *more: Any,
    sparse_mode: int = 0,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    mode = more[6] if more else sparse_mode  # torch hands on by place what has a place
    _check((query, key, value), head_num, input_layout, keep_prob, mode)
    scores = _scores(query, key, scale, atten_mask, mode)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    values = value.float().repeat_interleave(head_num // value.shape[2], 2)
    out = torch.einsum("bnst,btnd->bsnd", weights / total, values).to(query.dtype)
    eight = [x.expand(-1, -1, -1, 8).contiguous() for x in (top, total)]
    return out, *eight, query.new_empty(0), 0, 0, 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    **given: Any,
) -> tuple[Tensor, ...]:
    _check((query, key, value, dy, attention_in), head_num, input_layout, keep_prob, sparse_mode)
    assert softmax_max.shape == softmax_sum.shape == (query.shape[0], head_num, query.shape[1], 8)
    group = head_num // key.shape[2]
    k, v = (x.float().repeat_interleave(group, 2) for x in (key, value))
    scores = _scores(query, key, scale_value, atten_mask, sparse_mode)
    weights = torch.exp(scores - softmax_max[..., :1]) / softmax_sum[..., :1]
    grad = dy.float()
    delta = (grad * attention_in.float()).sum(-1).transpose(1, 2)[..., None]
    ds = weights * (torch.einsum("bsnd,btnd->bnst", grad, v) - delta) * scale_value
    dq = torch.einsum("bnst,btnd->bsnd", ds, k)
    dk = torch.einsum("bnst,bsnd->btnd", ds, query.float())
    dv = torch.einsum("bnst,bsnd->btnd", weights, grad)
    dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    nothing = query.new_empty(0)
    return *(x.to(query.dtype).contiguous() for x in (dq, dk, dv)), nothing, nothing


KERNELS = {"npu_fusion_attention": fusion_attention, "npu_fusion_attention_grad": fusion_attention_grad}
