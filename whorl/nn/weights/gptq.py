"""GPTQ: numbers packed along K, zero points along N, one less than they are in version 1; act-order by g_idx."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Format, Formats, Matrix, Part, Slot

from .dense import DENSE
from .packed import BITS, Packed, unpacked
from .quantised import (
    ONE_EACH,
    entries,
    is_of_a_tower,
    narrowed,
    never_quantised,
    of_one_entry,
    one_of,
    setting,
    stacked,
    starts,
    units,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Packed):
    """qweight [K / 8, N] and qzeros [groups, N / 8] of int32, scales [groups, N], g_idx [K]; of 8 bits 4 a word."""

    adds_one: bool  # to zero points as stored

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in of_one_entry(matrix):
            self._check(matrix, part)
        lead, (rows, columns) = entries(matrix), matrix.shape[-2:]
        groups = self.held_groups(matrix.parts[0])
        count, num_zeros = groups.stop - groups.start, starts(matrix, self.per_word)[1]
        return {
            "qweight": torch.empty(*lead, columns // self.per_word, rows, dtype=torch.int32),
            "qzeros": torch.empty(*lead, count, num_zeros, dtype=torch.int32),
            "scales": torch.empty(*lead, count, rows, dtype=torch.float32),
            "g_idx": torch.empty(*lead, starts(matrix, ONE_EACH)[1], columns, dtype=torch.int32),
        }

    def _check(self, matrix: Matrix, part: Part) -> None:
        self.check_size(matrix, part)
        if part.shape[0] % self.per_word or part.shape[1] % self.per_word:
            raise ValueError(
                f"{part.source(matrix.name)}: {part.shape[0]} rows and {part.shape[1]} columns, and GPTQ packs "
                f"{self.per_word} of each into a word"
            )

    def slots(self, matrix: Any, part: Part) -> Iterator[tuple[str, Slot]]:
        per, whole, rows = self.per_word, slice(None), part.rows
        (size, columns), groups = part.shape, self.held_groups(part)
        all_groups, mine = self.num_groups(columns), part.place[-1]
        yield (
            "qweight",
            Slot(
                into=matrix.qweight[stacked(part, whole, mine)],
                shape=(columns // per, size),
                index=(units(part.columns, per), rows),
                dtype=torch.int32,
            ),
        )
        first = starts(matrix, per)[0][part.first]
        zeros = units(rows, per)
        into = matrix.qzeros[stacked(part, whole, slice(first, first + zeros.stop - zeros.start))]
        yield "qzeros", Slot(into=into, shape=(all_groups, size // per), index=(groups, zeros), dtype=torch.int32)
        into = matrix.scales[stacked(part, whole, mine)]
        yield "scales", Slot(into=into, shape=(all_groups, size), index=(groups, rows))
        into = matrix.g_idx[stacked(part, starts(matrix, ONE_EACH)[0][part.first])]
        yield "g_idx", Slot(into=into, shape=(columns,), index=(part.columns,), dtype=torch.int32, default=-1)

    def finish(self, matrix: Any) -> None:
        """A word of qweight is a word of ours; they only stand the other way round."""
        zeros = torch.zeros(*matrix.scales.shape, dtype=torch.int16, device=matrix.scales.device)
        first, per = starts(matrix, self.per_word)[0], self.per_word
        for part in of_one_entry(matrix):
            mine = part.place[-1]
            assert isinstance(mine, slice)
            count = mine.stop - mine.start
            stored = matrix.qzeros[..., first[part.first] : first[part.first] + -(-count // per)]
            zeros[..., mine] = unpacked(stored, self.bits, count).to(torch.int16) + self.adds_one
        zeros = zeros if self.bits == 8 else zeros.to(torch.uint8)
        words, scales = matrix.qweight.mT.contiguous(), narrowed(matrix.scales.mT.contiguous())
        self.lay_out(matrix, words, scales, zeros.mT.contiguous(), matrix.g_idx)


def formats(settings: Mapping[str, Any]) -> Formats:
    own = _format(settings)
    keeps_head = not setting(settings, bool, False, "lm_head")
    chosen = _chosen(settings)
    dynamic = {pattern: _overridden(pattern, settings, change) for pattern, change in _dynamic(settings).items()}

    def of(name: str) -> Format:
        if never_quantised(name) or is_of_a_tower(name) or (keeps_head and name == "lm_head"):
            return DENSE
        if chosen and name != "lm_head" and not name.endswith(chosen):
            return DENSE
        return next((found for pattern, found in dynamic.items() if pattern.match(name)), own)

    every = [own, *(each for each in dynamic.values() if each != DENSE)]
    unit = Unit(*(lcm(*(each.unit[i] for each in every)) for i in range(2)))
    return Formats(of=of, unit=unit)


def _format(settings: Mapping[str, Any]) -> Gptq:
    group = setting(settings, int, -1, "group_size")
    if group < -1 or group == 0:
        raise ValueError(f"quantization_config: group_size is {group}, expected columns of a group, or -1 for all")
    return Gptq(
        bits=one_of(settings, "bits", BITS, None),
        group=None if group == -1 else group,
        is_ordered=setting(settings, bool, False, "desc_act"),
        adds_one=one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq",
    )


def _chosen(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Ends of the names of modules, where only some are quantised."""
    found = setting(settings, list, [], "modules_in_block_to_quantize")
    flat = [each for group in found for each in (group if isinstance(group, list) else [group])]
    if not all(isinstance(each, str) for each in flat):
        raise ValueError(
            f"quantization_config: modules_in_block_to_quantize is {str(found)[:60]}, expected lists of names"
        )
    return tuple(flat)


def _dynamic(settings: Mapping[str, Any]) -> dict["re.Pattern[str]", Any]:
    """Overrides by pattern in their order; None: not quantised."""
    found = setting(settings, dict, {}, "dynamic")
    result: dict[re.Pattern[str], Any] = {}
    for text, change in found.items():
        try:
            pattern = re.compile(text.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            raise ValueError(f"quantization_config: dynamic has {text!r}, which is no pattern: {error}") from error
        result[pattern] = None if text.startswith("-:") else change
    return result


def _overridden(pattern: "re.Pattern[str]", settings: Mapping[str, Any], change: Any) -> Format:
    if change is None:
        return DENSE
    if not isinstance(change, dict):
        raise ValueError(f"quantization_config: dynamic has {change!r} for {pattern.pattern!r}, expected an object")
    return _format({**settings, **change})
