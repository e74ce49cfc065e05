"""The common layout of AWQ, GPTQ and pack-quantized: integers of 4 or 8 bits with a scale for each group of columns.

words: int32 [.., N, ceil(K * bits / 32)], packed along K, the first value in the lowest bits; codes go from 0 to
2^bits - 1. scales: [.., N, groups]. zeros: [.., N, groups], absent where all are 2^(bits - 1); with 4 bits they go up
to 16. groups: int32 [.., K], the group of each column, absent where the columns of a group are neighbours. value =
(code - zero) * scale, in fp32, rounded to the model's dtype. Columns stay in the checkpoint's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Matrix, Part

from .laid_out import NO_KERNELS, is_tiled_on, lay_out_bytes, lay_out_int4, packing_of, values_of, warn_unpacked
from .quantised import Dim, Pick, Quantised, setting

WORD = 32
BITS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Quantised):
    """Integers of 4 or 8 bits, packed into words, with a scale for each group of columns."""

    bits: int
    group: int | None  # columns per group; None: a row is one group
    has_act_order: bool = False  # act-order: a column may be in any group (g_idx), so every rank has all groups' scales

    @property
    def per_word(self) -> int:
        return WORD // self.bits

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        """The unit at which shards are cut; rows too, because checkpoints pack zero points along them."""
        if self.group is None or self.has_act_order:
            return Unit(rows=self.per_word, columns=self.per_word)
        return Unit(rows=self.per_word, columns=max(self.group, self.per_word))

    def num_groups(self, columns: int) -> int:
        return 1 if self.group is None else columns // self.group

    def check_size(self, matrix: Matrix, part: Part) -> None:
        """Raise ValueError if the columns are not a multiple of the group."""
        group = self.group or 1
        if part.shape[1] % group:
            raise ValueError(
                f"{part.source(matrix.name)}: {part.shape[1]} columns, expected a multiple of the group of {group}"
            )

    def groups_of(self, part: Part) -> Dim:
        """Return the dim of a part's groups, of which this rank needs the scales of some."""
        if self.group is None or self.has_act_order:
            count = self.num_groups(part.shape[1])
            return Dim(count, slice(0, count), slice(None))
        return self.columns_of(part, self.group)

    def num_rank_groups(self, matrix: Matrix) -> int:
        """Return the number of groups whose scales this rank needs."""
        groups = self.groups_of(matrix.parts[0]).cut
        return groups.stop - groups.start  # type: ignore[no-any-return]

    def unpacked_zeros(self, matrix: Matrix, words: Tensor) -> Tensor:
        """Return zero points [.., groups, N] from words in which those of each part of the matrix begin a new one."""
        zeros = torch.zeros(*words.shape[:-1], matrix.shape[-2], dtype=torch.uint8, device=words.device)
        for part in matrix.entry_parts:
            rows, stored = self.rows_of(matrix, part).place, self.rows_of(matrix, part, self.per_word).place
            zeros[..., rows] = unpacked(words[..., stored], self.bits, rows.stop - rows.start)
        return zeros

    def lay_out(
        self, matrix: Matrix, words: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> None:
        """Set the final parameters; zeros and order are dropped where they have their default values.

        words, scales and zeros are in the common layout. order: g_idx of each projection, [.., parts, K]: the group of
        each column, counted over the columns of all ranks; -1: the checkpoint has no g_idx.
        """
        parameters = {"words": words, "scales": scales}
        if zeros is not None and not bool((zeros == 1 << (self.bits - 1)).all()):
            parameters["zeros"] = zeros
        if order is not None and (groups := self._groups(matrix, order, scales.shape[-1])) is not None:
            parameters["groups"] = groups
        reason: str | None = "columns are in any order, g_idx"
        if "groups" not in parameters:
            reason = self._lay_out_for_kernels(matrix, words, scales, parameters.get("zeros"))
        if reason is not None:
            warn_unpacked(words.device, f"weights of {self.bits} bits", reason)
            matrix.replace(**parameters)

    def _lay_out_for_kernels(self, matrix: Matrix, words: Tensor, scales: Tensor, zeros: Tensor | None) -> str | None:
        """Rearrange the weight for the device's kernels; returns None, or the reason that they cannot read it."""
        columns, count = self.group or 0, matrix.shape[-1]
        if self.bits == 4:
            return lay_out_int4(matrix, words, lambda entry: unpacked(entry, 4, count), scales, zeros, columns)
        if is_tiled_on(words.device) is None:
            return NO_KERNELS
        codes = (unpacked(words, 8, count) ^ 128).view(torch.int8)  # codes from -128 to 127
        zeros = None if zeros is None else zeros.to(torch.int16) - 128
        return lay_out_bytes(matrix, codes, scales, zeros, columns=columns)

    def _groups(self, matrix: Matrix, order: Tensor, count: int) -> Tensor | None:
        """Return the group of each column, [.., K], or None where the columns of a group are neighbours.

        count: the groups that have scales on this rank. Raises ValueError for a g_idx that does not fit.
        """
        parts = matrix.entry_parts
        groups = order[..., 0, :]
        for number, part in enumerate(parts):
            if not torch.equal(order[..., number, :], groups):
                raise ValueError(
                    f"{parts[0].source(matrix.name)} and {part.source(matrix.name)} are stored as one matrix, and "
                    f"the checkpoint has their columns in different groups (g_idx)"
                )
        columns = parts[0].columns
        in_order = torch.arange(columns.start, columns.stop, device=order.device)
        in_order = torch.zeros_like(in_order) if self.group is None else in_order // self.group
        if bool((groups == -1).all()) or torch.equal(groups, in_order.expand(groups.shape).to(groups.dtype)):
            if not self.has_act_order or self.group is None or count == self.num_groups(matrix.shape[-1]):
                return None
            # With act-order a rank has the scales of all groups, but only some columns: they need their group's index.
            return in_order.expand(groups.shape).to(groups.dtype).contiguous()
        if not self.has_act_order:
            raise ValueError(
                f"{parts[0].source(matrix.name)}: g_idx is not in order, and config.json says desc_act false"
            )
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise ValueError(
                f"{parts[0].source(matrix.name)}: g_idx has groups {int(groups.min())} to {int(groups.max())}, "
                f"expected 0 to {count - 1}"
            )
        return groups.contiguous()

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        if packing_of(matrix) is not None:
            return values_of(matrix, pick)
        columns = matrix.shape[-1]
        codes, scales = unpacked(matrix.words[pick], self.bits, columns), matrix.scales[pick].float()
        zeros, groups = getattr(matrix, "zeros", None), getattr(matrix, "groups", None)
        zeros = None if zeros is None else zeros[pick].float()
        if groups is None:
            codes, scales = codes.unflatten(-1, (scales.shape[-1], -1)), scales.unsqueeze(-1)
            zeros = None if zeros is None else zeros.unsqueeze(-1)
        else:
            groups = groups if groups.dim() == 1 else groups[pick]
            index = groups.long().unsqueeze(-2).expand(*scales.shape[:-1], columns)
            scales, zeros = scales.gather(-1, index), None if zeros is None else zeros.gather(-1, index)
        middle = 1 << (self.bits - 1)
        values = (codes.float() - (middle if zeros is None else zeros)) * scales
        return values.view(*values.shape[: len(matrix.shape) - 1], columns).to(matrix.dtype)

    def randomize(self, matrix: Matrix, generator: torch.Generator) -> None:
        """Draw random words and random signs of scales.

        Every code is equally likely, so codes have a mean of -1/2. With scales of one sign it would add the same number
        to all outputs of a product, which makes all tokens alike after some layers.
        """
        shape, device = matrix.shape, generator.device
        words = torch.empty(*shape[:-1], -(-shape[-1] // self.per_word), dtype=torch.int32, device=device)
        words.random_(-(2**31), 2**31, generator=generator)
        scale = ((4.0**self.bits - 1) / 12 * shape[-1]) ** -0.5
        count = self.num_groups(shape[-1])
        scales = torch.empty(*shape[:-1], count, dtype=torch.bfloat16, device=device)
        scales.random_(0, 2, generator=generator).mul_(2 * scale).sub_(scale)
        self.lay_out(matrix, words, scales, None, None)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return uint8 codes [.., count] from int32 [.., ceil(count * bits / 32)]: the lowest bits come first."""
    codes = words.contiguous().flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return codes[..., :count]


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words from codes [.., K] of 0 to 2^bits - 1; the end of the last word is filled with zeros."""
    per_word = WORD // bits
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % per_word))
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(torch.int32)


def group_size(settings: Mapping[str, Any], default: int, *names: str) -> int | None:
    """Return the columns of a group by the first of these settings that is there; None: a row is one group."""
    group = setting(settings, int, default, *names)
    if group < -1 or group == 0:
        raise ValueError(
            f"quantization_config: group_size is {group}, expected the columns of a group, or -1 for one group per row"
        )
    return None if group == -1 else int(group)
