"""Causal attention of packed sequences in Triton, by the kernels that prefill prompts, so the bits are equal.

In the engine those kernels read keys from the blocks of a cache. Here they read k and v as they are, without a copy:
the keys of a sequence lie one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from .._rows import unit_stride
from ..sparse_attention import masked_triton
from .cuts_triton import LOG2_E
from .packed import Gradients, backward_by_sequence, read
from .prompt_triton import prompt


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if not lse.numel() or len(starts) == 1:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse
    q, k, v = (unit_stride(x) for x in (q, k, v))
    starts = starts.contiguous()
    # `prompt` takes a block table, which it does not read here, then query starts and lengths.
    tensors = [q, k[None], v[None], starts, starts, starts[1:] - starts[:-1]]
    strides = (*q.stride()[:2], 0, *k.stride()[:2], 0, *v.stride()[:2], 0)
    return prompt(tensors, (None, None), strides, scale * LOG2_E, window, sinks=sinks, lse=lse), lse


def backward(q: Tensor, starts: Tensor, **arguments: Any) -> Gradients:
    return backward_by_sequence(masked_triton.backward, q=q, starts=read(starts, len(q)), **arguments)
