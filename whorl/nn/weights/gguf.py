"""GGUF weights in the blocks of the file: a row is a number of blocks of 32 or 256 values, each with its own scales.

Columns may be in another order than the checkpoint's. A block may span what lies apart in that order, so they stay as
they are stored: values are put in order when they are unpacked, and kernels take inputs in the file's order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Matrix, Part

from .quantised import Dim, Pick, Quantised


class Tiles(NamedTuple):
    """Columns of `modules` are `group` value heads, of `width` columns, for each key head. The checkpoint has the heads
    of a key head together; the file has the first head of every key head, then the second ones."""

    modules: frozenset[str] = frozenset()
    group: int = 1
    width: int = 1

    def has(self, matrix: Matrix) -> bool:
        return matrix.parts[0].source(matrix.name) in self.modules

    def as_checkpoint(self, x: Tensor) -> Tensor:
        """Put columns that are in the file's order in the checkpoint's."""
        return x.unflatten(-1, (self.group, -1, self.width)).transpose(-3, -2).flatten(-3)

    def as_file(self, x: Tensor) -> Tensor:
        """Put columns that are in the checkpoint's order in the file's."""
        return x.unflatten(-1, (-1, self.group, self.width)).transpose(-3, -2).flatten(-3)

    def ranges(self, columns: slice, total: int) -> list[slice]:
        """Return where the file has some columns of the checkpoint, which are all heads of some key heads."""
        first, end = columns.start // self.group, columns.stop // self.group
        return [slice(first + at, end + at) for at in range(0, total, total // self.group)]


@dataclass(frozen=True, slots=True)
class GgufBlocks(Quantised):
    """Weights in GGUF's blocks, each projection in its own type.

    The parameters are blocks0, blocks1, ... uint8 [.., rows, bytes of a row], one for each part of a matrix. kinds: the
    GGUF type of each module, by name.
    """

    kinds: Mapping[str, str]
    tiles: Tiles = Tiles()  # noqa: RUF009 (a tuple)

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return Unit(columns=lcm(*(KINDS[kind].values for kind in set(self.kinds.values()))))

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        parameters = {}
        for number, part in enumerate(matrix.entry_parts):
            width = part.columns.stop - part.columns.start
            size = self._kind(matrix, part).row_bytes(width)
            parameters[f"blocks{number}"] = torch.empty(*matrix.lead, _count(part), size, dtype=torch.uint8)
        return parameters

    def _kind(self, matrix: Matrix, part: Part) -> Any:
        return KINDS[self.kinds[part.source(matrix.name)]]

    def destinations(self, matrix: Matrix, part: Part) -> Iterator[tuple[str, Destination]]:
        kind, blocks = self._kind(matrix, part), getattr(matrix, f"blocks{_number(matrix, part)}")
        rows, first = Dim(part.shape[0], part.rows, slice(None)), 0
        for columns in self._stored_columns(matrix, part, kind):
            cut = slice(*(kind.row_bytes(n) for n in (columns.start, columns.stop)))
            place = slice(first, first := first + cut.stop - cut.start)
            dims = rows, Dim(kind.row_bytes(part.shape[1]), cut, place)
            yield "weight", self.destination(blocks, part, *dims, dtype=torch.uint8)

    def _stored_columns(self, matrix: Matrix, part: Part, kind: "Kind") -> list[slice]:
        """Return this rank's columns as the file has them; ValueError where they cut blocks."""
        if not self.tiles.has(matrix) or part.columns == slice(0, part.shape[1]):
            return [part.columns]
        ranges = self.tiles.ranges(part.columns, part.shape[1])
        if any(n % kind.values for each in ranges for n in (each.start, each.stop)):
            raise ValueError(
                f"{matrix.name}: this rank's value heads are columns {ranges[0].start} to {ranges[0].stop} of the "
                f"file, which has blocks of {kind.values}: take fewer tensor-parallel ranks (--tp), or --unpack"
            )
        return ranges

    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        if matrix.lead:
            values = [self._unpacked(matrix, part, pick) for part in matrix.entry_parts]
            return torch.cat(values, -2)
        if isinstance(pick, Tensor):
            is_single = len(matrix.parts) == 1
            return self._unpacked(matrix, matrix.parts[0], pick) if is_single else self.values(matrix)[pick]
        first, end, _ = pick.indices(matrix.shape[0])
        values = []
        for part in matrix.parts:
            low, high = max(first - part.first, 0), min(end - part.first, _count(part))
            values += [self._unpacked(matrix, part, slice(low, high))] if low < high else []
        padding = end - first - sum(len(part_values) for part_values in values)  # rows that pad the last rank's shard
        return torch.cat([*values, *([values[0].new_zeros(padding, matrix.shape[1])] if padding else [])])

    def _unpacked(self, matrix: Matrix, part: Part, pick: Pick) -> Tensor:
        stored = getattr(matrix, f"blocks{_number(matrix, part)}")[pick]
        values: Tensor = self._kind(matrix, part).unpack(stored)
        return (self.tiles.as_checkpoint(values) if self.tiles.has(matrix) else values).to(matrix.dtype)

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        raise ValueError("random weights in GGUF blocks are not supported; name a file, or use another format")


def _count(part: Part) -> int:
    """Return the rows of a projection that this rank has."""
    return part.rows.stop - part.rows.start


def _number(matrix: Matrix, part: Part) -> int:
    """Return the number n of the parameter blocks<n> that stores a projection."""
    return next(i for i, candidate in enumerate(matrix.entry_parts) if candidate.first == part.first)


# ---- unpacking blocks to fp32 as llama.cpp does: products and sums in its order, each rounded

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
