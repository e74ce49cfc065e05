"""GPTQ: weights are packed along K, zero points along N; with act-order, g_idx has the group of each column.

Version 1 of the format stores every zero point minus one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Format, Formats, Matrix, Part

from .dense import DENSE
from .packed import BITS, Packed, group_size
from .quantised import ONE_EACH, is_in_vision_tower, narrow_scales, never_quantised, one_of, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Packed):
    """GPTQ weights: qweight [K / 8, N] and qzeros [groups, N / 8] of int32, scales [groups, N], g_idx [K].

    These are the shapes for 4 bits; with 8 bits a word has 4 numbers instead of 8.
    """

    adds_one: bool  # zero points are stored minus one (version 1)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in matrix.entry_parts:
            self._check(matrix, part)
        lead, (rows, columns) = matrix.lead, matrix.shape[-2:]
        count, num_zeros = self.num_rank_groups(matrix), self.part_starts(matrix, self.per_word)[1]
        return {
            "qweight": torch.empty(*lead, columns // self.per_word, rows, dtype=torch.int32),
            "qzeros": torch.empty(*lead, count, num_zeros, dtype=torch.int32),
            "scales": torch.empty(*lead, count, rows, dtype=torch.float32),
            "g_idx": torch.empty(*lead, self.part_starts(matrix, ONE_EACH)[1], columns, dtype=torch.int32),
        }

    def _check(self, matrix: Matrix, part: Part) -> None:
        self.check_size(matrix, part)
        if part.shape[0] % self.per_word or part.shape[1] % self.per_word:
            raise ValueError(
                f"{part.source(matrix.name)}: {part.shape[0]} rows and {part.shape[1]} columns, expected multiples of "
                f"{self.per_word}: GPTQ packs that many into a word"
            )

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        rows, words = self.rows_of(matrix, part), self.rows_of(matrix, part, self.per_word)
        groups = self.groups_of(part)
        packed_columns, order = self.columns_of(part, self.per_word), self.row_of(matrix, matrix.g_idx, part)
        yield "qweight", self.destination(matrix.qweight, part, packed_columns, rows, dtype=torch.int32)
        yield "qzeros", self.destination(matrix.qzeros, part, groups, words, dtype=torch.int32)
        yield "scales", self.destination(matrix.scales, part, groups, rows)
        yield "g_idx", self.destination(order, part, self.columns_of(part), dtype=torch.int32, default=-1)

    def finish(self, matrix: Any) -> None:
        """Convert the tensors to the common layout of packed.py, which has the same words as qweight, transposed."""
        zeros = self.unpacked_zeros(matrix, matrix.qzeros)
        zeros = (zeros.to(torch.int16) if self.bits == 8 else zeros) + int(self.adds_one)
        words, scales = matrix.qweight.mT.contiguous(), narrow_scales(matrix.scales.mT.contiguous())
        self.lay_out(matrix, words, scales, zeros.mT.contiguous(), matrix.g_idx)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a GPTQ checkpoint of its `quantization_config`."""
    default = _format(settings)
    is_head_dense = not setting(settings, bool, False, "lm_head")
    quantised_ends = _quantised_ends(settings)
    dynamic = {pattern: _overridden(pattern, settings, change) for pattern, change in _dynamic(settings).items()}

    def of(name: str) -> Format:
        if never_quantised(name) or is_in_vision_tower(name) or (is_head_dense and name == "lm_head"):
            return DENSE
        if quantised_ends and name != "lm_head" and not name.endswith(quantised_ends):
            return DENSE
        return next((override for pattern, override in dynamic.items() if pattern.match(name)), default)

    quantised = [default, *(format for format in dynamic.values() if format != DENSE)]
    unit = Unit(*(lcm(*(format.unit[i] for format in quantised)) for i in range(2)))
    return Formats(of=of, unit=unit)


def _format(settings: Mapping[str, Any]) -> Gptq:
    return Gptq(
        bits=one_of(settings, "bits", BITS, None),
        group=group_size(settings, -1, "group_size"),
        has_act_order=setting(settings, bool, False, "desc_act"),
        adds_one=one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq",
    )


def _quantised_ends(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ends of names of the modules that are quantised, or () for all."""
    groups = setting(settings, list, [], "modules_in_block_to_quantize")
    ends = [end for group in groups for end in (group if isinstance(group, list) else [group])]
    if not all(isinstance(end, str) for end in ends):
        raise ValueError(
            f"quantization_config: modules_in_block_to_quantize is {str(groups)[:60]}, expected lists of names"
        )
    return tuple(ends)


def _dynamic(settings: Mapping[str, Any]) -> dict["re.Pattern[str]", Any]:
    """Return overrides by pattern, in their order; None: not quantised."""
    overrides = setting(settings, dict, {}, "dynamic")
    result: dict[re.Pattern[str], Any] = {}
    for text, change in overrides.items():
        try:
            pattern = re.compile(text.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            raise ValueError(
                f"quantization_config: dynamic has {text!r}, which is not a regular expression: {error}"
            ) from error
        result[pattern] = None if text.startswith("-:") else change
    return result


def _overridden(pattern: "re.Pattern[str]", settings: Mapping[str, Any], change: Any) -> Format:
    if change is None:
        return DENSE
    if not isinstance(change, dict):
        raise ValueError(f"quantization_config: dynamic has {change!r} for {pattern.pattern!r}, expected an object")
    return _format({**settings, **change})
