"""Causal attention of packed sequences on Triton: by the kernels of prompts, and so with their bits.

Those read a cache of pages. Keys that lie one after the other are one, of pages that hold a single key: nothing is
copied, and the table counts upwards.
"""

from typing import Any

import torch
from torch import Tensor

from ..linear_triton import unit_stride
from ..sparse_attention import masked_triton
from .cuts_triton import LOG2_E
from .packed import Gradients, backward_by_sequence
from .prompt_triton import prompt


def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if not lse.numel() or len(starts) == 1:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse
    q, k, v = (unit_stride(x) for x in (q, k, v))
    table = torch.arange(len(q), dtype=torch.int32, device=q.device)
    tensors = [q, k.unsqueeze(1), v.unsqueeze(1), table, starts.contiguous(), starts[1:] - starts[:-1]]
    strides = (*q.stride()[:2], *(s for x in (k, v) for s in (x.stride(0), *x.stride()[:2])), len(q))
    return prompt(tensors, strides, scale * LOG2_E, window, lse), lse


def backward(**given: Any) -> Gradients:
    return backward_by_sequence(masked_triton.backward, **given)
