"""GGUF weights in the blocks of the file: a row is a number of blocks of 32 or 256 values, each with its own scales."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Format, Formats, Matrix, Part

from .gguf_blocks import KINDS
from .quantised import Pick, Quantised, entry_index, entry_parts, setting, stack_dims


@dataclass(frozen=True, slots=True)
class GgufBlocks(Quantised):
    """Weights in GGUF's blocks, each projection in its own type.

    The parameters are blocks0, blocks1, ... uint8 [.., rows, bytes of a row], one for each part of a matrix. kinds: the
    GGUF type of each module, by name.
    """

    kinds: Mapping[str, str]

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return Unit(columns=lcm(*(KINDS[kind].values for kind in set(self.kinds.values()))))

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        parameters = {}
        for number, part in enumerate(entry_parts(matrix)):
            width = part.columns.stop - part.columns.start
            size = self._kind(matrix, part).row_bytes(width)
            parameters[f"blocks{number}"] = torch.empty(*stack_dims(matrix), _count(part), size, dtype=torch.uint8)
        return parameters

    def _kind(self, matrix: Matrix, part: Part) -> Any:
        return KINDS[self.kinds[part.source(matrix.name)]]

    def destinations(self, matrix: Matrix, part: Part) -> Iterator[tuple[str, Destination]]:
        kind, number = self._kind(matrix, part), _number(matrix, part)
        columns = slice(*(kind.row_bytes(n) for n in (part.columns.start, part.columns.stop)))
        into = getattr(matrix, f"blocks{number}")[entry_index(part, slice(None))]
        shape = part.shape[0], kind.row_bytes(part.shape[1])
        yield "weight", Destination(into=into, shape=shape, index=(part.rows, columns), dtype=torch.uint8)

    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        if stack_dims(matrix):
            values = [self._unpacked(matrix, part, pick) for part in entry_parts(matrix)]
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
        return values.to(matrix.dtype)

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        raise ValueError("random weights in GGUF blocks are not supported; name a file, or use another format")


def _count(part: Part) -> int:
    """Return the rows of a projection that this rank has."""
    return part.rows.stop - part.rows.start


def _number(matrix: Matrix, part: Part) -> int:
    """Return the number n of the parameter blocks<n> that stores a projection."""
    return next(i for i, candidate in enumerate(entry_parts(matrix)) if candidate.first == part.first)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a GGUF file; settings: made of the file's header, no config.json has them."""
    kinds = setting(settings, dict, {}, "kinds")
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"{name} is of type {kind}, which cannot stay packed; expected one of {', '.join(KINDS)}")
    if not kinds:
        raise ValueError("quantization_config: gguf without the kinds of its tensors: name the .gguf file itself")
    blocks: Format = GgufBlocks(kinds)
    return Formats(of=lambda name: blocks, unit=blocks.unit)
