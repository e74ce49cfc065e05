"""AWQ in the "gemm" layout: the matrix is transposed, and eight neighbours along N share a word, in a special order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn.weight import Destination, Format, Formats, Matrix, Part

from .dense import DENSE
from .packed import Packed, group_size, packed, unpacked
from .quantised import is_in_vision_tower, is_listed, names, narrow_scales, never_quantised, one_of, setting

PER_WORD = 8
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of each of eight neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Packed):
    """AWQ weights: qweight [K, N / 8] and qzeros [groups, N / 8] of int32, scales [groups, N]."""

    bits: int = 4

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in matrix.entry_parts:
            self.check_size(matrix, part)
            if part.shape[0] % PER_WORD:
                raise ValueError(
                    f"{part.source(matrix.name)}: {part.shape[0]} rows, expected a multiple of {PER_WORD}, which AWQ "
                    "packs into a word"
                )
        lead, (rows, columns) = matrix.lead, matrix.shape[-2:]
        groups = self.num_groups(columns)
        return {
            "qweight": torch.empty(*lead, columns, rows // PER_WORD, dtype=torch.int32),
            "qzeros": torch.empty(*lead, groups, rows // PER_WORD, dtype=torch.int32),
            "scales": torch.empty(*lead, groups, rows, dtype=torch.float32),
        }

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        words, groups = self.rows_of(matrix, part, PER_WORD), self.groups_of(part)
        yield "qweight", self.destination(matrix.qweight, part, self.columns_of(part), words, dtype=torch.int32)
        yield "qzeros", self.destination(matrix.qzeros, part, groups, words, dtype=torch.int32)
        yield "scales", self.destination(matrix.scales, part, groups, self.rows_of(matrix, part))

    def finish(self, matrix: Any) -> None:
        if matrix.qweight.dim() == 2:
            words = packed(unpack_columns(matrix.qweight).mT, self.bits)
        else:  # one expert at a time: unpacked to bytes, all experts would take twice the memory of the matrix
            words = torch.stack([packed(unpack_columns(entry).mT, self.bits) for entry in matrix.qweight])
        zeros = unpack_columns(matrix.qzeros).mT.contiguous()
        self.lay_out(matrix, words, narrow_scales(matrix.scales.mT.contiguous()), zeros, None)


def unpack_columns(words: Tensor) -> Tensor:
    """Return uint8 codes [.., N] from int32 words [.., N / 8], in the order of the matrix's rows."""
    numbers = unpacked(words, 4, words.shape[-1] * PER_WORD).unflatten(-1, (-1, PER_WORD))
    return numbers[..., list(POSITIONS)].flatten(-2)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of an AWQ checkpoint of its `quantization_config`."""
    one_of({"bits": setting(settings, int, 4, "bits", "w_bit")}, "bits", (4,), 4)
    version = str(setting(settings, str, "gemm", "version")).lower()
    one_of({"version": version}, "version", ("gemm",), "gemm")
    one_of(settings, "zero_point", (True,), True)
    quantised = Awq(group=group_size(settings, 128, "group_size", "q_group_size"))
    unconverted = names(settings, "modules_to_not_convert")
    is_head_dense = not setting(settings, bool, False, "lm_head")

    def of(name: str) -> Format:
        is_dense = never_quantised(name) or is_in_vision_tower(name) or (is_head_dense and name == "lm_head")
        return DENSE if is_dense or is_listed(name, unconverted) else quantised

    return Formats(of=of, unit=quantised.unit)
