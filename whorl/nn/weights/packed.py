"""Whole numbers of 4 or 8 bits with a scale for each group of columns: the layout that several checkpoints end in.

words: int32 [.., N, ceil(K * bits / 32)], packed along K, the first value in the lowest bits; a value is a number from
0 to 2^bits - 1. scales: [.., N, groups]. zeros: [.., N, groups], absent where all are 2^(bits - 1); of 4 bits they go
up to 16. groups: int32 [.., K], the group of each column, absent where groups are neighbours.
value = (number - zero) * scale, in fp32, rounded to the model's dtype. Columns stay in the checkpoint's order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Matrix, Part

from .laid_out import is_tiled_on, lay_out_bytes, lay_out_int4, layout_of, values_of, warn_unpacked
from .quantised import Pick, Quantised, of_one_entry

WORD = 32
BITS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Quantised):
    bits: int
    group: int | None  # columns; None: a row is one group
    is_ordered: bool = False  # columns belong to groups in any order, so that ranks have the scales of all groups

    @property
    def per_word(self) -> int:
        return WORD // self.bits

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        """Rows where a checkpoint packs along them, as zero points are."""
        if self.group is None or self.is_ordered:
            return Unit(rows=self.per_word, columns=self.per_word)
        return Unit(rows=self.per_word, columns=max(self.group, self.per_word))

    def num_groups(self, columns: int) -> int:
        return 1 if self.group is None else columns // self.group

    def check_size(self, matrix: Matrix, part: Part) -> None:
        """Refuse what the layout has no place for."""
        group = self.group or 1
        if part.shape[1] % group:
            raise ValueError(
                f"{part.source(matrix.name)}: {part.shape[1]} columns are no whole number of groups of {group}"
            )

    def held_groups(self, part: Part) -> slice:
        """Of the scales, those that this rank needs."""
        if self.group is None or self.is_ordered:
            return slice(0, self.num_groups(part.shape[1]))
        return slice(part.columns.start // self.group, part.columns.stop // self.group)

    def lay_out(
        self, matrix: Matrix, words: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> None:
        """Hold the final parameters. zeros and order are dropped where they say what goes without saying.

        order: [.., parts, K], the group of each column by the whole matrix's count; -1: the checkpoint does not say.
        """
        held = {"words": words, "scales": scales}
        if zeros is not None and not bool((zeros == 1 << (self.bits - 1)).all()):
            held["zeros"] = zeros
        if order is not None and (groups := self._groups(matrix, order, scales.shape[-1])) is not None:
            held["groups"] = groups
        if "groups" not in held and self._lay_out_for_kernels(matrix, words, scales, held.get("zeros")):
            return
        shuffled = " with columns in any order (g_idx)" if "groups" in held else ""
        warn_unpacked(words.device, f"weights of {self.bits} bits{shuffled}")
        matrix.replace(**held)

    def _lay_out_for_kernels(self, matrix: Matrix, words: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
        """Where the device has such; whether it was done."""
        columns, count = self.group or 0, matrix.shape[-1]
        if self.bits == 4:
            return lay_out_int4(matrix, words, lambda own: unpacked(own, 4, count), scales, zeros, columns)
        if is_tiled_on(words.device) is None:
            return False
        codes = (unpacked(words, 8, count) ^ 128).view(torch.int8)  # from -128 on
        zeros = None if zeros is None else zeros.to(torch.int16) - 128
        return lay_out_bytes(matrix, codes, scales, zeros, columns=columns)

    def _groups(self, matrix: Matrix, order: Tensor, count: int) -> Tensor | None:
        parts = of_one_entry(matrix)
        first = order[..., 0, :]
        for number, part in enumerate(parts):
            if not torch.equal(order[..., number, :], first):
                raise ValueError(
                    f"{parts[0].source(matrix.name)} and {part.source(matrix.name)} are one matrix here, and the "
                    f"checkpoint has their columns in different groups (g_idx)"
                )
        columns = parts[0].columns
        plain = torch.arange(columns.start, columns.stop, device=order.device)
        plain = torch.zeros_like(plain) if self.group is None else plain // self.group
        if bool((first == -1).all()) or torch.equal(first, plain.expand(first.shape).to(first.dtype)):
            if not self.is_ordered or self.group is None or count == self.num_groups(matrix.shape[-1]):
                return None
            return plain.expand(first.shape).to(first.dtype).contiguous()
        if not self.is_ordered:
            raise ValueError(
                f"{parts[0].source(matrix.name)}: g_idx is not in order, and config.json says desc_act false"
            )
        if int(first.min()) < 0 or int(first.max()) >= count:
            raise ValueError(
                f"{parts[0].source(matrix.name)}: g_idx has groups {int(first.min())} to {int(first.max())}, expected "
                f"0 to {count - 1}"
            )
        return first.contiguous()

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        if layout_of(matrix) is not None:
            return values_of(matrix, pick)
        columns = matrix.shape[-1]
        numbers, scales = unpacked(matrix.words[pick], self.bits, columns), matrix.scales[pick].float()
        zeros, groups = getattr(matrix, "zeros", None), getattr(matrix, "groups", None)
        zeros = None if zeros is None else zeros[pick].float()
        if groups is None:
            numbers, scales = numbers.unflatten(-1, (scales.shape[-1], -1)), scales.unsqueeze(-1)
            zeros = None if zeros is None else zeros.unsqueeze(-1)
        else:
            groups = groups if groups.dim() == 1 else groups[pick]
            at = groups.long().unsqueeze(-2).expand(*scales.shape[:-1], columns)
            scales, zeros = scales.gather(-1, at), None if zeros is None else zeros.gather(-1, at)
        middle = 1 << (self.bits - 1)
        values = (numbers.float() - (middle if zeros is None else zeros)) * scales
        return values.view(*values.shape[: len(matrix.shape) - 1], columns).to(matrix.dtype)

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        """Every number is as likely as any other."""
        shape, device = matrix.shape, generator.device
        words = torch.empty(*shape[:-1], -(-shape[-1] // self.per_word), dtype=torch.int32, device=device)
        words.random_(-(2**31), 2**31, generator=generator)
        spread = ((4.0**self.bits - 1) / 12 * shape[-1]) ** -0.5
        count = self.num_groups(shape[-1])
        scales = torch.full((*shape[:-1], count), spread, dtype=torch.bfloat16, device=device)
        self.lay_out(matrix, words, scales, None, None)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [.., count] from int32 [.., ceil(count * bits / 32)]: the lowest bits first, as in bytes of the host."""
    found = words.contiguous().flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), -1).flatten(-2)
    return found[..., :count]


def packed(numbers: Tensor, bits: int) -> Tensor:
    """The way back. numbers: [.., K] from 0 to 2^bits - 1; what is left of the last word is zeros."""
    per_word = WORD // bits
    numbers = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[-1] % per_word))
    if bits == 4:
        numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
    return numbers.contiguous().view(torch.int32)
