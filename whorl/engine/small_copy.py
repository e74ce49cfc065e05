"""Copy a few bytes between pinned host memory and a GPU.

A copy engine takes some 8 microseconds to start and as long to synchronise, and a decode step waits for two such
copies: its inputs and its sampled tokens. A kernel reads or writes the host's memory directly, in the stream.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from whorl.device import HOST, accelerator, is_interpreting, overlaps_kernels, unavailable
from whorl.streams import event

MOST = 1 << 16  # bytes; larger copies are faster by the copy engine


def start_copy(source: Tensor, to: Tensor) -> None:
    """Start a copy between contiguous tensors of one dtype and shape, of which the one on the host is pinned."""
    device = to.device if source.device.type == HOST else source.device
    is_small = 0 < source.nbytes <= MOST and overlaps_kernels(device) and not is_interpreting()
    if not is_small or unavailable("triton", device.type) is not None:
        to.copy_(source, non_blocking=True)
        return
    from .small_copy_triton import copy

    copy(source.view(torch.uint8), to.view(torch.uint8))


def fetch(x: Tensor) -> Callable[[], Tensor]:
    """Start copying `x` to the host; return a function that waits for the copy and returns it."""
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
