"""Causal attention of packed sequences on Ascend: one npu_fusion_attention per sequence.

Its bits are not equal to those of npu_fused_infer_attention_score, which the engine uses there: the device promises no
order of sums.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _torch_npu
from ..sparse_attention import masked_torch_npu
from .packed import Gradients, backward_by_sequence, sequences


def reason(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None = None, **_: object) -> str | None:
    """Return None, or the reason that npu_fusion_attention cannot take these arguments."""
    if sinks is not None:
        return "npu_fusion_attention is called without sinks here"
    if window:
        return f"npu_fusion_attention is called without a sliding window here, got a window of {window}"
    return masked_torch_npu.reason(q, k, v, None)


def backward_reason(q: Tensor, k: Tensor, v: Tensor, window: int, dlse: Tensor | None, **_: object) -> str | None:
    """Return None, or the reason that npu_fusion_attention_grad cannot take these arguments."""
    if dlse is not None:
        return "npu_fusion_attention_grad takes no gradient of lse"
    return reason(q, k, v, window)


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, sinks: None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for part in sequences("causal_attention", _torch_npu.on_host(starts), len(q)):
        out[part], lse[part] = masked_torch_npu.forward(q[part], k[part], v[part], None, scale)
    return out, lse


def backward(starts: Tensor, **arguments: Any) -> Gradients:
    return backward_by_sequence(masked_torch_npu.backward, starts=_torch_npu.on_host(starts), **arguments)
