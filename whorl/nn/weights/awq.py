"""AWQ, the "gemm" layout: everything packed along N, eight columns of a word in an order of their own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn.weight import Format, Formats, Matrix, Part, Slot

from .dense import DENSE
from .packed import Packed, packed, unpacked
from .quantised import (
    entries,
    is_listed,
    is_of_a_tower,
    names,
    narrowed,
    never_quantised,
    of_one_entry,
    one_of,
    setting,
    stacked,
    units,
)

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight neighbours stands in a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Packed):
    """qweight [K, N / 8] and qzeros [groups, N / 8] of int32, scales [groups, N]."""

    bits: int = 4

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in of_one_entry(matrix):
            self.check_size(matrix, part)
            if part.shape[0] % PER_WORD:
                raise ValueError(
                    f"{part.source(matrix.name)}: {part.shape[0]} rows, and AWQ packs {PER_WORD} of them into a word"
                )
        lead, (rows, columns) = entries(matrix), matrix.shape[-2:]
        groups = self.num_groups(columns)
        return {
            "qweight": torch.empty(*lead, columns, rows // PER_WORD, dtype=torch.int32),
            "qzeros": torch.empty(*lead, groups, rows // PER_WORD, dtype=torch.int32),
            "scales": torch.empty(*lead, groups, rows, dtype=torch.float32),
        }

    def slots(self, matrix: Any, part: Part) -> Iterator[tuple[str, Slot]]:
        (size, columns), groups = part.shape, self.held_groups(part)
        rows, whole, mine = units(part.rows, PER_WORD), slice(None), part.place[-1]
        assert isinstance(mine, slice)
        words = stacked(part, whole, units(mine, PER_WORD))
        shape = columns, size // PER_WORD
        yield (
            "qweight",
            Slot(into=matrix.qweight[words], shape=shape, index=(part.columns, rows), dtype=torch.int32),
        )
        shape = self.num_groups(columns), size // PER_WORD
        yield "qzeros", Slot(into=matrix.qzeros[words], shape=shape, index=(groups, rows), dtype=torch.int32)
        into = matrix.scales[stacked(part, whole, mine)]
        yield "scales", Slot(into=into, shape=(self.num_groups(columns), size), index=(groups, part.rows))

    def finish(self, matrix: Any) -> None:
        if matrix.qweight.dim() == 2:
            words = packed(in_order(matrix.qweight).mT, self.bits)
        else:  # one at a time: numbers of all experts in a byte each are twice the matrix
            words = torch.stack([packed(in_order(each).mT, self.bits) for each in matrix.qweight])
        zeros = in_order(matrix.qzeros).mT.contiguous()
        self.lay_out(matrix, words, narrowed(matrix.scales.mT.contiguous()), zeros, None)


def in_order(words: Tensor) -> Tensor:
    """uint8 [.., N] from int32 [.., N / 8]."""
    numbers = unpacked(words, 4, words.shape[-1] * PER_WORD).unflatten(-1, (-1, PER_WORD))
    return numbers[..., list(PLACES)].flatten(-2)


def formats(settings: Mapping[str, Any]) -> Formats:
    one_of({"bits": setting(settings, int, 4, "bits", "w_bit")}, "bits", (4,), 4)
    version = str(setting(settings, str, "gemm", "version")).lower()
    one_of({"version": version}, "version", ("gemm",), "gemm")
    one_of(settings, "zero_point", (True,), True)
    group = setting(settings, int, 128, "group_size", "q_group_size")
    if group < -1 or group == 0:
        raise ValueError(f"quantization_config: group_size is {group}, expected columns of a group, or -1 for all")
    own = Awq(group=None if group == -1 else group)
    kept = names(settings, "modules_to_not_convert")
    keeps_head = not setting(settings, bool, False, "lm_head")

    def of(name: str) -> Format:
        is_kept = never_quantised(name) or is_of_a_tower(name) or (keeps_head and name == "lm_head")
        return DENSE if is_kept or is_listed(name, kept) else own

    return Formats(of=of, unit=own.unit)
