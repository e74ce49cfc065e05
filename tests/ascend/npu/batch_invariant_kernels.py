"""AscendC's batch-invariant operators in plain torch, called as their callers call them; see kernels.py."""

from typing import Any

import torch
from attention_kernels import fused_infer_attention_score, linear
from npu.bound import Call
from torch import Tensor

OPERATOR = "npu_fused_infer_attention_score"


def mm(a: Tensor, b: Tensor) -> Tensor:
    return linear(a, b.t())


def reduce_sum(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    assert dim == -1
    return x.double().sum(dim, keepdim=keepdim).to(x.dtype)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    return torch.log_softmax(x.double(), dim).to(x.dtype)


def coarse_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """As a device may: each mask, each layout and each padded length has an error of its own."""
    call = Call(OPERATOR, *args, **kwargs)
    length = 31 if call.input_layout == "TND" else call.query.shape[1] % 31
    out, lse = fused_infer_attention_score(*args, **kwargs)
    return out * (1 + (8 * length + call.sparse_mode + 4 * (call.atten_mask is not None)) / 1024), lse


KERNELS = {
    "npu_mm_batch_invariant": mm,
    "npu_reduce_sum_batch_invariant": reduce_sum,
    "npu_log_softmax_batch_invariant": log_softmax,
    f"{OPERATOR}_batch_invariant": fused_infer_attention_score,
}
