"""Formats of AdamW's moments on the host: unchanged, bfloat16, or 8 bits on a logarithmic scale."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # number of values that share a scale in the 8-bit format


class Format(Protocol):
    """Stores a flat tensor of values as one or more flat tensors, its parts, such as codes and scales.

    `decode` and `encode` run on the device of the parts: the accelerator in a step, the host for a state dict.
    """

    name: str
    is_exact: bool  # the values keep their dtype and bits

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        """For values of `dtype`, return the dtype of each part and how many values one element of it covers."""
        ...

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """Return the first `size` values, in float32, or for `Exact` a view of the part in its own dtype."""
        ...

    def encode(self, x: Tensor, parts: Sequence[Tensor], generator: torch.Generator | None) -> None:
        """Write the values x into the parts, rounded stochastically, which is unbiased.

        Without a generator they are rounded to the nearest.
        """
        ...


class Exact:
    """Stores the values in their own dtype."""

    name, is_exact = "exact", True

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        return ((dtype, 1),)

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        return parts[0][:size]

    def encode(self, x: Tensor, parts: Sequence[Tensor], generator: torch.Generator | None) -> None:
        if x.data_ptr() != parts[0].data_ptr():  # otherwise x is what `decode` returned, updated in place
            parts[0][: x.numel()].copy_(x)


class Bfloat16:
    """Stores values in bfloat16, with a relative error below 2**-7.

    Rounding is stochastic, because an update with a beta2 of 0.999 changes a value by about 0.1 %, less than half a
    step of bfloat16: rounded to the nearest, a stored value would never change.
    """

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
    """Stores a scale for each block of 256 values, the largest magnitude, and an 8-bit level for each value.

    Levels are on a logarithmic scale: each is 9.2 % above the one below, and the lowest is `octaves` octaves (powers of
    two) below the largest value of the block; level 0 is zero. A stored value is within one level of the computed one.
    signed: the level has the sign of the value, for the first moment. The second moment has no sign; if positive, it is
    never stored as zero, because the first is divided by its root.
    """

    name, is_exact = "int8", False

    def __init__(self, *, signed: bool) -> None:
        self.signed, self.levels, self.octaves = signed, 127 if signed else 255, 16 if signed else 32

    def parts(self, dtype: torch.dtype) -> Sequence[tuple[torch.dtype, int]]:
        return ((torch.int8 if self.signed else torch.uint8, 1), (torch.float32, BLOCK))

    def _value(self, level: Tensor) -> Tensor:
        """Return the value of a level relative to the largest value of the block; level 0 is zero."""
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
        relative = torch.where(scales > 0, blocks.abs() / scales, torch.zeros_like(blocks))
        exact_level = self.levels + torch.log2(relative) * ((self.levels - 1) / self.octaves)
        below = exact_level.floor().clamp(0, self.levels - 1)
        low, high = self._value(below), self._value(below + 1)
        probability = (relative - low) / (high - low)
        threshold = 0.5 if generator is None else torch.rand(probability.shape, device=x.device, generator=generator)
        level = below + (probability > threshold)
        if not self.signed:
            level = torch.where(relative > 0, level.clamp(min=1), level)
        codes = (blocks.sign() * level).view(-1)[:size]
        parts[0][:size].copy_(codes)
        parts[1][: len(scales)].copy_(scales[:, 0])


FORMATS: dict[str, tuple[Format, Format]] = {  # the formats of the first and of the second moment
    "exact": (Exact(), Exact()),
    "bfloat16": (Bfloat16(), Bfloat16()),
    "int8": (Int8(signed=True), Int8(signed=False)),
}
