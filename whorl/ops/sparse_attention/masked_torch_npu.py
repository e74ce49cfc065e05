"""Dense causal attention of ordinary heads on Ascend, by npu_fusion_attention and its gradient."""

from typing import Any

import torch
from torch import Tensor

from whorl.contracts import fusion_attention_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from ..attention.paged_torch_npu import compressed_mask

REPEATED = 8  # the operator stores softmax maxima and sums as [B, N, S, 8], each number 8 times


def reason(q: Tensor, k: Tensor, v: Tensor, bits: Tensor | None, **_: object) -> str | None:
    """Return None, or the reason that npu_fusion_attention cannot compute the forward."""
    if bits is not None:
        return "npu_fusion_attention takes byte masks, not bit masks; pass bits=None for causal attention"
    if not all(x.numel() for x in (q, k, v)):
        return "empty tensors are not taken"
    if q.shape[0] > k.shape[0]:
        return f"takes no query without keys, got {q.shape[0]} queries and {k.shape[0]} keys"
    return fusion_attention_limit(query_shape=q.shape, key_shape=k.shape, value_dim=v.shape[2], dtype=dtype_name(q))


def backward_reason(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor | None, dlse: Tensor | None, **_: object
) -> str | None:
    """Return None, or the reason that npu_fusion_attention_grad cannot compute the backward."""
    if dlse is not None:
        return "npu_fusion_attention_grad takes no gradient of lse"
    return reason(q, k, v, bits)


def _arguments(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return the arguments of both directions: one causal sequence, the last query at the last key."""
    return {
        "query": q[None].contiguous(),
        "key": k[None].contiguous(),
        "value": v[None].contiguous(),
        "head_num": q.shape[1],
        "input_layout": "BSND",
        "atten_mask": compressed_mask(q.device),
        "keep_prob": 1.0,
        "sparse_mode": 3,
    }


def forward(q: Tensor, k: Tensor, v: Tensor, bits: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    out, top, total, *_ = _torch_npu.call("npu_fusion_attention", **_arguments(q, k, v), scale=scale)
    return out[0], (top[0, ..., 0] + total[0, ..., 0].log()).T.contiguous()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    top = lse.T[None, ..., None].expand(-1, -1, -1, REPEATED).contiguous()
    dq, dk, dv, *_ = _torch_npu.call(
        "npu_fusion_attention_grad",
        **_arguments(q, k, v),
        dy=dout[None].contiguous(),
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        attention_in=out[None].contiguous(),
        scale_value=scale,
    )
    return dq[0], dk[0], dv[0]
