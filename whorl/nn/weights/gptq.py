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
from .packed import BITS, Packed, unpacked
from .quantised import (
    ONE_EACH,
    entry_index,
    entry_parts,
    is_in_vision_tower,
    narrow_scales,
    never_quantised,
    one_of,
    part_starts,
    setting,
    stack_dims,
    unit_slice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Packed):
    """GPTQ weights: qweight [K / 8, N] and qzeros [groups, N / 8] of int32, scales [groups, N], g_idx [K].

    These are the shapes for 4 bits; with 8 bits a word has 4 numbers instead of 8.
    """

    adds_one: bool  # zero points are stored minus one (version 1)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in entry_parts(matrix):
            self._check(matrix, part)
        lead, (rows, columns) = stack_dims(matrix), matrix.shape[-2:]
        groups = self.rank_groups(matrix.parts[0])
        count, num_zeros = groups.stop - groups.start, part_starts(matrix, self.per_word)[1]
        return {
            "qweight": torch.empty(*lead, columns // self.per_word, rows, dtype=torch.int32),
            "qzeros": torch.empty(*lead, count, num_zeros, dtype=torch.int32),
            "scales": torch.empty(*lead, count, rows, dtype=torch.float32),
            "g_idx": torch.empty(*lead, part_starts(matrix, ONE_EACH)[1], columns, dtype=torch.int32),
        }

    def _check(self, matrix: Matrix, part: Part) -> None:
        self.check_size(matrix, part)
        if part.shape[0] % self.per_word or part.shape[1] % self.per_word:
            raise ValueError(
                f"{part.source(matrix.name)}: {part.shape[0]} rows and {part.shape[1]} columns, expected multiples of "
                f"{self.per_word}: GPTQ packs that many into a word"
            )

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        per, all_rows, rows = self.per_word, slice(None), part.rows
        (size, columns), groups = part.shape, self.rank_groups(part)
        all_groups, place = self.num_groups(columns), part.place[-1]
        yield (
            "qweight",
            Destination(
                into=matrix.qweight[entry_index(part, all_rows, place)],
                shape=(columns // per, size),
                index=(unit_slice(part.columns, per), rows),
                dtype=torch.int32,
            ),
        )
        first = part_starts(matrix, per)[0][part.first]
        zeros = unit_slice(rows, per)
        into = matrix.qzeros[entry_index(part, all_rows, slice(first, first + zeros.stop - zeros.start))]
        yield (
            "qzeros",
            Destination(into=into, shape=(all_groups, size // per), index=(groups, zeros), dtype=torch.int32),
        )
        into = matrix.scales[entry_index(part, all_rows, place)]
        yield "scales", Destination(into=into, shape=(all_groups, size), index=(groups, rows))
        into = matrix.g_idx[entry_index(part, part_starts(matrix, ONE_EACH)[0][part.first])]
        yield "g_idx", Destination(into=into, shape=(columns,), index=(part.columns,), dtype=torch.int32, default=-1)

    def finish(self, matrix: Any) -> None:
        """Convert the tensors to the common layout of packed.py, which has the same words as qweight, transposed."""
        zeros = torch.zeros(*matrix.scales.shape, dtype=torch.int16, device=matrix.scales.device)
        first, per = part_starts(matrix, self.per_word)[0], self.per_word
        for part in entry_parts(matrix):
            place = part.place[-1]
            assert isinstance(place, slice)
            count = place.stop - place.start
            stored = matrix.qzeros[..., first[part.first] : first[part.first] + -(-count // per)]
            zeros[..., place] = unpacked(stored, self.bits, count).to(torch.int16) + self.adds_one
        zeros = zeros if self.bits == 8 else zeros.to(torch.uint8)
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
    group = setting(settings, int, -1, "group_size")
    if group < -1 or group == 0:
        raise ValueError(
            f"quantization_config: group_size is {group}, expected the columns of a group, or -1 for one group per row"
        )
    return Gptq(
        bits=one_of(settings, "bits", BITS, None),
        group=None if group == -1 else group,
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
