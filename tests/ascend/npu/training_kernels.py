"""The vendor's attention of training, forward and backward, in plain torch. See kernels.py."""

import torch
from npu.attention_kernels import UNLIMITED, hidden_keys
from npu.bound import Call, by_schema
from torch import Tensor


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, mode: int) -> Tensor:
    """[B, N, S, K] fp32, minus infinity where a key is hidden."""
    queries, keys = query.shape[1], key.shape[1]
    group = query.shape[2] // key.shape[2]
    hidden = hidden_keys(queries, keys, mode, mask, UNLIMITED, UNLIMITED, is_single=False)
    scores = torch.einsum("bsnd,btnd->bnst", query.float(), key.float().repeat_interleave(group, 2)) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _check(call: Call, *more: Tensor) -> None:
    tensors = (call.query, call.key, call.value, *more)
    assert call.input_layout == "BSND", call.input_layout
    assert call.head_num == tensors[0].shape[2]
    assert call.keep_prob == 1.0
    assert call.sparse_mode == (0 if call.atten_mask is None else 3)  # all keys are seen, or those up to the query's
    assert all(x.is_contiguous() and x.dtype == tensors[0].dtype for x in tensors)


@by_schema("npu_fusion_attention")
def fusion_attention(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    _check(call)
    query, value = call.query, call.value
    scores = _scores(query, call.key, call.scale, call.atten_mask, call.sparse_mode)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    values = value.float().repeat_interleave(call.head_num // value.shape[2], 2)
    out = torch.einsum("bnst,btnd->bsnd", weights / total, values).to(query.dtype)
    eight = [x.expand(-1, -1, -1, 8).contiguous() for x in (top, total)]
    return out, *eight, query.new_empty(0), 0, 0, 0


@by_schema("npu_fusion_attention_grad")
def fusion_attention_grad(call: Call) -> tuple[Tensor, ...]:
    _check(call, call.dy, call.attention_in)
    query, key, top, total = call.query, call.key, call.softmax_max, call.softmax_sum
    assert top.shape == total.shape == (query.shape[0], call.head_num, query.shape[1], 8)
    group = call.head_num // key.shape[2]
    k, v = (x.float().repeat_interleave(group, 2) for x in (key, call.value))
    scores = _scores(query, key, call.scale_value, call.atten_mask, call.sparse_mode)
    weights = torch.exp(scores - top[..., :1]) / total[..., :1]
    grad = call.dy.float()
    delta = (grad * call.attention_in.float()).sum(-1).transpose(1, 2)[..., None]
    ds = weights * (torch.einsum("bsnd,btnd->bnst", grad, v) - delta) * call.scale_value
    dq = torch.einsum("bnst,btnd->bsnd", ds, k)
    dk = torch.einsum("bnst,bsnd->btnd", ds, query.float())
    dv = torch.einsum("bnst,bsnd->btnd", weights, grad)
    dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    nothing = query.new_empty(0)
    return *(x.to(query.dtype).contiguous() for x in (dq, dk, dv)), nothing, nothing


KERNELS = {"npu_fusion_attention": fusion_attention, "npu_fusion_attention_grad": fusion_attention_grad}
