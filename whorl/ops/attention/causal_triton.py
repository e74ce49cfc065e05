"""Causal attention of packed sequences on Triton: by the kernels of prompts, and so with their bits.

Those read keys from the pages of a cache; here they lie one after the other, and nothing is copied.
"""

from typing import Any

import torch
from torch import Tensor

from ..linear_triton import unit_stride
from ..sparse_attention import masked_triton
from .cuts_triton import LOG2_E
from .packed import Gradients, backward_by_sequence, read
from .prompt_triton import prompt


def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if not lse.numel() or len(starts) == 1:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse
    q, k, v = (unit_stride(x) for x in (q, k, v))
    starts = starts.contiguous()
    tensors = [q, k[None], v[None], starts, starts, starts[1:] - starts[:-1]]  # the first `starts` for a table
    strides = (*q.stride()[:2], 0, *k.stride()[:2], 0, *v.stride()[:2], 0)
    return prompt(tensors, (None, None), strides, scale * LOG2_E, window, lse), lse


def backward(q: Tensor, starts: Tensor, **given: Any) -> Gradients:
    return backward_by_sequence(masked_triton.backward, q=q, starts=read(starts, len(q)), **given)
