"""The blocks of GGUF files, unpacked to fp32 as llama.cpp does: products and sums in its order, each rounded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SUB = 32  # values that share a scale in blocks of 256


@dataclass(frozen=True, slots=True)
class Kind:
    values: int  # of a block
    num_bytes: int
    unpack_blocks: Callable[[Tensor], Tensor]  # uint8 [n, num_bytes] to fp32 [n, values]

    def row_bytes(self, columns: int) -> int:
        return columns // self.values * self.num_bytes

    def unpack(self, stored: Tensor) -> Tensor:
        """[.., columns] from uint8 [.., bytes of a row]."""
        blocks = stored.reshape(-1, self.num_bytes)
        return self.unpack_blocks(blocks).view(*stored.shape[:-1], stored.shape[-1] // self.num_bytes * self.values)


def _half(blocks: Tensor, first: int) -> Tensor:
    """[n, 1] from two bytes."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """Low ones, then high ones."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _fifth(blocks: Tensor) -> Tensor:
    """[n, 32] of 0 or 16 from four bytes, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks.unsqueeze(-1) >> places & 1).flatten(1) << 4


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


def _scales(six: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight sub-blocks, of 6 bits each in 12 bytes."""
    first, second, rest = six.split(4, -1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    return scales.float(), minima.float()


def _halves(blocks: Tensor) -> Tensor:
    """[n, 8, 32] from 128 bytes: of 32 bytes the low halves are a sub-block, and the high halves the next."""
    runs = blocks.unflatten(-1, (4, SUB))
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1, 2)


def _with_minima(blocks: Tensor, numbers: Tensor) -> Tensor:
    scales, minima = _scales(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return (scales.unsqueeze(-1) * numbers.float() - minima.unsqueeze(-1)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _halves(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 16:48].unsqueeze(1) >> places & 1) << 4
    return _with_minima(blocks, _halves(blocks[:, 48:]) | high)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), 2).reshape(-1, 2, 4, SUB)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 128:192].unflatten(-1, (2, 1, SUB)) >> places & 3) << 4
    numbers = (low | high).flatten(1).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * numbers.unflatten(-1, (16, 16))).flatten(1)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
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
    "F32": Kind(1, 4, _as(torch.float32)),
    "F16": Kind(1, 2, _as(torch.float16)),
    "BF16": Kind(1, 2, _as(torch.bfloat16)),
}
