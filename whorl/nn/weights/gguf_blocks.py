"""Unpacks the blocks of GGUF files to fp32 as llama.cpp does: products and sums in its order, each rounded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SUB = 32  # values of a sub-block, which share a scale, in blocks of 256


@dataclass(frozen=True, slots=True)
class Kind:
    """A GGUF type: the values and bytes of a block, and how blocks are unpacked."""

    values: int  # per block
    num_bytes: int  # per block
    unpack_blocks: Callable[[Tensor], Tensor]  # uint8 [n, num_bytes] to fp32 [n, values]

    def row_bytes(self, columns: int) -> int:
        return columns // self.values * self.num_bytes

    def unpack(self, stored: Tensor) -> Tensor:
        """Return fp32 [.., columns] from uint8 [.., bytes of a row]."""
        blocks = stored.reshape(-1, self.num_bytes)
        return self.unpack_blocks(blocks).view(*stored.shape[:-1], stored.shape[-1] // self.num_bytes * self.values)


def _half(blocks: Tensor, first: int) -> Tensor:
    """Return the fp16 number at byte `first` of each block, [n, 1] in fp32."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """Return the low nibbles of all bytes, then the high ones."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _fifth(blocks: Tensor) -> Tensor:
    """Return the fifth bits, [n, 32] of 0 or 16, from four bytes with the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks.unsqueeze(-1) >> shifts & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6])).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8])).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of eight sub-blocks, stored with 6 bits each in 12 bytes."""
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales.float(), minima.float()


def _halves(blocks: Tensor) -> Tensor:
    """Return [n, 8, 32] from 128 bytes: the low halves of 32 bytes are a sub-block, the high halves the next one."""
    runs = blocks.unflatten(-1, (4, SUB))
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1, 2)


def _with_minima(blocks: Tensor, numbers: Tensor) -> Tensor:
    scales, minima = _scales(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return (scales.unsqueeze(-1) * numbers.float() - minima.unsqueeze(-1)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _halves(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    return _with_minima(blocks, _halves(blocks[:, 48:]) | high)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), 2).reshape(-1, 2, 4, SUB)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 128:192].unflatten(-1, (2, 1, SUB)) >> shifts & 3) << 4
    numbers = (low | high).flatten(1).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * numbers.unflatten(-1, (16, 16))).flatten(1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


KINDS = {
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_1": Kind(32, 20, _q4_1),
    "Q5_0": Kind(32, 22, _q5_0),
    "Q5_1": Kind(32, 24, _q5_1),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
    "F32": Kind(1, 4, _plain(torch.float32)),
    "F16": Kind(1, 2, _plain(torch.float16)),
    "BF16": Kind(1, 2, _plain(torch.bfloat16)),
}
