"""How AdamW's moments are kept on the host: as they are, in bfloat16, or in 8 bits of a logarithmic scale."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # values that share a scale in 8 bits


class Format(Protocol):
    """A flat tensor of n values is kept in parts; `decode` and `encode` work on the device."""

    name: str
    is_exact: bool

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        """For values of `dtype`: what each part holds, and how many values one element of it stands for."""
        ...

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor: ...

    def encode(self, x: Tensor, parts: Sequence[Tensor], generator: torch.Generator | None) -> None:
        """Rounds at random, so that it is right on average; without a generator to the nearest."""
        ...


class Exact:
    name, is_exact = "exact", True

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        return ((dtype, 1),)

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        return parts[0][:size]

    def encode(self, x: Tensor, parts: Sequence[Tensor], generator: torch.Generator | None) -> None:
        if x.data_ptr() != parts[0].data_ptr():  # else it was updated in place
            parts[0][: x.numel()].copy_(x)


class Bfloat16:
    """Each value is within 2**-7 of what was computed. To the nearest, a beta2 of 0.999 would never move it."""

    name, is_exact = "bfloat16", False

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        return ((torch.bfloat16, 1),)

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        return parts[0][:size].float()

    def encode(self, x: Tensor, parts: Sequence[Tensor], generator: torch.Generator | None) -> None:
        if generator is not None:
            low = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
            x = ((x.view(torch.int32) + low) & -(1 << 16)).view(torch.float32)
        parts[0][: x.numel()].copy_(x)


class Int8:
    """A scale for 256 values and a level for each: levels are 9.2 % apart, `octaves` below the block's largest.

    Each value is within one level of what was computed. A positive second moment is never kept as zero, since the
    first is divided by its root.
    """

    name, is_exact = "int8", False

    def __init__(self, *, signed: bool) -> None:
        self.signed, self.levels, self.octaves = signed, 127 if signed else 255, 16 if signed else 32

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        return ((torch.int8 if self.signed else torch.uint8, 1), (torch.float32, BLOCK))

    def _value(self, level: Tensor) -> Tensor:
        """Of the block's largest; level 0 is zero."""
        value = torch.exp2((level - self.levels) * (self.octaves / (self.levels - 1)))
        return torch.where(level == 0, torch.zeros_like(value), value)

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        codes = F.pad(parts[0][:size].float(), (0, -size % BLOCK)).view(-1, BLOCK)
        scales = parts[1][: len(codes), None]
        return (codes.sign() * self._value(codes.abs()) * scales).view(-1)[:size]

    def encode(self, x: Tensor, parts: Sequence[Tensor], generator: torch.Generator | None) -> None:
        size = x.numel()
        blocks = F.pad(x, (0, -size % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True)
        share = torch.where(scales > 0, blocks.abs() / scales, torch.zeros_like(blocks))
        exact = self.levels + torch.log2(share) * ((self.levels - 1) / self.octaves)
        below = exact.floor().clamp(0, self.levels - 1)
        low, high = self._value(below), self._value(below + 1)
        chance = (share - low) / (high - low)
        drawn = 0.5 if generator is None else torch.rand(chance.shape, device=x.device, generator=generator)
        level = below + (chance > drawn)
        if not self.signed:
            level = torch.where(share > 0, level.clamp(min=1), level)
        codes = (blocks.sign() * level).view(-1)[:size]
        parts[0][:size].copy_(codes)
        parts[1][: len(scales)].copy_(scales[:, 0])


FORMATS: dict[str, tuple[Format, Format]] = {  # of the first and the second moment
    "exact": (Exact(), Exact()),
    "bfloat16": (Bfloat16(), Bfloat16()),
    "int8": (Int8(signed=True), Int8(signed=False)),
}
