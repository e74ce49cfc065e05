"""Gated activations on CPUs."""

import torch
from torch import Tensor

from .library import library, plain, use_threads


def glu(x: Tensor, *, activation: str = "silu", interleaved: bool = False) -> Tensor:
    wide, width = plain(x).contiguous(), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width)
    step, first = (2, 1) if interleaved else (1, width)
    use_threads()
    library().whorl_cpu_glu(
        *(wide.data_ptr(), wide.data_ptr() + 4 * first, out.numel() // max(width, 1), 2 * width, step, width),
        *(activation != "silu", out.data_ptr()),
    )
    return out if x.dtype == torch.float32 else out.to(x.dtype)
