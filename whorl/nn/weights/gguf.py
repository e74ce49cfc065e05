"""GGUF's blocks as the file has them: a row is so many blocks of 32 or 256 values, each with scales of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Format, Formats, Matrix, Part, Slot

from .gguf_blocks import KINDS
from .quantised import Pick, Quantised, entries, of_one_entry, setting, stacked


@dataclass(frozen=True, slots=True)
class GgufBlocks(Quantised):
    """Every projection in a kind of its own: blocks0, blocks1, ... uint8 [.., rows, bytes of a row], one for each part
    of a matrix. kinds: by the name of a module."""

    kinds: Mapping[str, str]

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return Unit(columns=lcm(*(KINDS[kind].values for kind in set(self.kinds.values()))))

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        held = {}
        for number, part in enumerate(of_one_entry(matrix)):
            width = part.columns.stop - part.columns.start
            size = self._kind(matrix, part).row_bytes(width)
            held[f"blocks{number}"] = torch.empty(*entries(matrix), _count(part), size, dtype=torch.uint8)
        return held

    def _kind(self, matrix: Matrix, part: Part) -> Any:
        return KINDS[self.kinds[part.source(matrix.name)]]

    def slots(self, matrix: Matrix, part: Part) -> Iterator[tuple[str, Slot]]:
        kind, number = self._kind(matrix, part), _number(matrix, part)
        columns = slice(*(kind.row_bytes(n) for n in (part.columns.start, part.columns.stop)))
        into = getattr(matrix, f"blocks{number}")[stacked(part, slice(None))]
        shape = part.shape[0], kind.row_bytes(part.shape[1])
        yield "weight", Slot(into=into, shape=shape, index=(part.rows, columns), dtype=torch.uint8)

    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        if entries(matrix):
            found = [self._unpacked(matrix, part, pick) for part in of_one_entry(matrix)]
            return torch.cat(found, -2)
        if isinstance(pick, Tensor):
            whole = len(matrix.parts) == 1
            return self._unpacked(matrix, matrix.parts[0], pick) if whole else self.values(matrix)[pick]
        first, end, _ = pick.indices(matrix.shape[0])
        found = []
        for part in matrix.parts:
            low, high = max(first - part.first, 0), min(end - part.first, _count(part))
            found += [self._unpacked(matrix, part, slice(low, high))] if low < high else []
        lost = end - first - sum(len(each) for each in found)  # rows that pad the last rank's share
        return torch.cat([*found, *([found[0].new_zeros(lost, matrix.shape[1])] if lost else [])])

    def _unpacked(self, matrix: Matrix, part: Part, pick: Pick) -> Tensor:
        stored = getattr(matrix, f"blocks{_number(matrix, part)}")[pick]
        values: Tensor = self._kind(matrix, part).unpack(stored)
        return values.to(matrix.dtype)

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        raise ValueError("random weights in GGUF's blocks are not made: name a file, or another format")


def _count(part: Part) -> int:
    return part.rows.stop - part.rows.start


def _number(matrix: Matrix, part: Part) -> int:
    return next(i for i, each in enumerate(of_one_entry(matrix)) if each.first == part.first)


def formats(settings: Mapping[str, Any]) -> Formats:
    """settings: made of a GGUF file's header; no config.json has them."""
    kinds = setting(settings, dict, {}, "kinds")
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"{name} is of type {kind}, which is held unpacked only; packed are {', '.join(KINDS)}")
    if not kinds:
        raise ValueError("quantization_config: gguf without the kinds of its tensors: name the .gguf file itself")
    own: Format = GgufBlocks(kinds)
    return Formats(of=lambda name: own, unit=own.unit)
