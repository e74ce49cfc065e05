"""The arrays of calls on the host and on the device, where their memory never moves, as recorded calls require."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whorl.device import HOST, accelerator, host_buffer, is_interpreting, overlaps_kernels, unavailable
from whorl.streams import event

from .call import Call, Size, field_offsets, field_views
from .graph_sizes import BESIDE

_NUM_STAGES = 4  # host buffers: two calls a step, and the host is at most one step ahead
MOST_COPIED = 1 << 16  # bytes of a copy by a kernel; larger copies are faster by the copy engine
_TYPES = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


class Padded(NamedTuple):
    """The size of a call with its padding. decoding_from: if it has both prompts and decoding sequences, the token and
    the sequence at which those that decode begin. is_recorded: graphs have this size, so that it occurs often."""

    size: Size
    decoding_from: tuple[int, int] | None = None
    is_recorded: bool = False


class Inputs:
    """Sends calls of up to `max_tokens` tokens to a device.

    padding: the values of padding elements by array, if they are not 0.
    """

    def __init__(self, max_tokens: int, device: str, padding: dict[str, int]) -> None:
        self.max_tokens, self._device, self._padding = max_tokens, device, padding
        num_bytes = field_offsets((max_tokens + BESIDE[-1],) * 3)[1]  # prompts and decoding sequences are padded
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._stages = itertools.cycle([_Stage(num_bytes, device) for _ in range(_NUM_STAGES)])

    def send(self, call: Call, padded: Padded) -> None:
        """Write a call with its padding and start the copy to the device."""
        if max(call.size) > self.max_tokens:
            raise ValueError(
                f"Runner: a call has {max(call.size)} tokens, expected at most {self.max_tokens} (max_tokens)"
            )
        stage = next(self._stages)
        num_bytes = stage.write(call, padded, self._padding)
        start_copy(stage.bytes[:num_bytes], self._on_device[:num_bytes])
        stage.sent = event(self._device)

    def tensors(self, size: Size) -> dict[str, Tensor]:
        """Return the arrays of the last call, of this size with padding, as views of the buffer on the device."""
        return {
            name: self._on_device[start : start + int(kind[1]) * count].view(_TYPES[kind])
            for name, kind, start, count in field_offsets(size)[0]
        }


class _Stage:
    """A host buffer from which a copy to the device may be in progress."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.bytes = host_buffer(num_bytes, device)
        self.sent: Callable[[], None] = lambda: None
        self._array = self.bytes.numpy()
        self._views: dict[Size, dict[str, np.ndarray]] = {}  # those of recorded sizes: other calls may have any size

    def write(self, call: Call, padded: Padded, padding: dict[str, int]) -> int:
        """Wait until the buffer is free, write the call into it and return the number of bytes."""
        self.sent()
        views = self._views.get(padded.size)
        if views is None:
            views = field_views(self._array, padded.size)
            if padded.is_recorded:
                self._views[padded.size] = views
        call.write(views, padding, padded.decoding_from)
        return field_offsets(padded.size)[1]


# ---- copies between pinned host memory and a GPU

# A copy engine takes some 8 microseconds to start and as long to synchronise, and a decode step waits for two such
# copies: its inputs and its sampled tokens. A kernel reads or writes the host's memory directly, in the stream.


def start_copy(source: Tensor, to: Tensor) -> None:
    """Start a copy between contiguous tensors of one dtype and shape, of which the one on the host is pinned."""
    device = to.device if source.device.type == HOST else source.device
    is_small = 0 < source.nbytes <= MOST_COPIED and overlaps_kernels(device) and not is_interpreting()
    if not is_small or unavailable("triton", device.type) is not None:
        to.copy_(source, non_blocking=True)
        return
    from .kernels_triton import copy

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
