"""Copies of a few bytes between the host's pinned memory and a GPU.

A copy engine takes some 8 microseconds to begin and as long to hand over, and a decode step waits for two such copies:
what it reads and the tokens it gives. A kernel reads or writes the host's memory itself, and is part of the stream.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from whorl.device import HOST, accelerator, event, is_interpreting, overlaps_kernels, unavailable

MOST = 1 << 16  # bytes; more are faster by the copy engine


def start_copy(source: Tensor, to: Tensor) -> None:
    """Between contiguous tensors of one dtype and shape; the one on the host is pinned. Returns before it is done."""
    device = to.device if source.device.type == HOST else source.device
    is_small = 0 < source.nbytes <= MOST and overlaps_kernels(device) and not is_interpreting()
    if not is_small or unavailable("triton", device.type) is not None:
        to.copy_(source, non_blocking=True)
        return
    from .small_copy_triton import copy

    copy(source.view(torch.uint8), to.view(torch.uint8))


def fetch(x: Tensor) -> Callable[[], Tensor]:
    """Start copying `x` to the host; the function waits for it and gives it."""
    device = x.device.type
    if accelerator(device) is None:
        return lambda: x
    copy = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True)
    start_copy(x.contiguous(), copy)
    wait = event(device)

    def read() -> Tensor:
        wait()
        return copy

    return read
