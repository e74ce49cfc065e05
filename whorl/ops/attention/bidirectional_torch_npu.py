"""Bidirectional attention of packed segments on Ascend: one npu_fusion_attention per segment."""

import torch
from torch import Tensor

from whorl.contracts import fusion_attention_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from .packed import Gradients, sequences
from .segment_gradients import plain_backward


def reason(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, **_: object) -> str | None:
    """Return None, or the reason that npu_fusion_attention cannot take these arguments."""
    if not q.numel() or len(starts) == 1:
        return "empty tensors are not taken"
    return fusion_attention_limit(query_shape=q.shape, key_shape=k.shape, value_dim=v.shape[2], dtype=dtype_name(q))


def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for part in sequences("packed_attention", _torch_npu.on_host(starts), len(q)):
        out[part] = _torch_npu.call(
            "npu_fusion_attention",
            query=q[None, part].contiguous(),
            key=k[None, part].contiguous(),
            value=v[None, part].contiguous(),
            head_num=q.shape[1],
            input_layout="BSND",
            scale=scale,
            keep_prob=1.0,
            sparse_mode=0,
        )[0][0]
    return out


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Gradients:
    """By plain products: npu_fusion_attention_grad needs what its forward saved, and only q, k and v are kept."""
    return plain_backward(dout, q, k, v, _torch_npu.on_host(starts), scale)
