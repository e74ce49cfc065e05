"""compressed-tensors' pack-quantized: weights are packed along K and zero points along N.

Both are signed numbers, stored with 2^(bits - 1) added.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Matrix, Part

from .packed import Packed, unpacked
from .quantised import ONE_EACH, entry_index, entry_parts, narrow_scales, part_starts, stack_dims, unit_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPacked(Packed):
    """pack-quantized weights: weight_packed int32 [N, ceil(K / 8)], weight_scale [N, groups], weight_shape.

    Asymmetric ones also have weight_zero_point int32 [ceil(N / 8), groups], those with act-order weight_g_idx [K].
    These are the shapes for 4 bits; with 8 bits a word has 4 numbers instead of 8.
    """

    has_zeros: bool

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        rows, columns = Packed.unit.fget(self)  # type: ignore[attr-defined]
        return Unit(rows=rows if self.has_zeros else 1, columns=columns)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in entry_parts(matrix):
            self.check_size(matrix, part)
        lead, (rows, columns) = stack_dims(matrix), matrix.shape[-2:]
        groups = self.rank_groups(matrix.parts[0])
        count, num_parts = groups.stop - groups.start, part_starts(matrix, ONE_EACH)[1]
        parameters = {
            "words": torch.empty(*lead, rows, -(-columns // self.per_word), dtype=torch.int32),
            "scales": torch.empty(*lead, rows, count, dtype=torch.float32),
            "shapes": torch.empty(*lead, num_parts, 2, dtype=torch.int64),
        }
        if self.has_zeros:
            parameters["packed_zeros"] = torch.empty(
                *lead, part_starts(matrix, self.per_word)[1], count, dtype=torch.int32
            )
        if self.has_act_order:
            parameters["g_idx"] = torch.empty(*lead, num_parts, columns, dtype=torch.int32)
        return parameters

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        (size, columns), groups, per = part.shape, self.rank_groups(part), self.per_word
        number = part_starts(matrix, ONE_EACH)[0][part.first]
        yield (
            "weight_packed",
            Destination(
                into=matrix.words[part.place],
                shape=(size, -(-columns // per)),
                index=(part.rows, unit_slice(part.columns, per)),
                dtype=torch.int32,
            ),
        )
        shape = size, self.num_groups(columns)
        yield "weight_scale", Destination(into=matrix.scales[part.place], shape=shape, index=(part.rows, groups))
        into = matrix.shapes[entry_index(part, number)]
        yield "weight_shape", Destination(into=into, shape=(2,), index=(slice(0, 2),), dtype=torch.int64)
        if self.has_zeros:
            rows, first = unit_slice(part.rows, per), part_starts(matrix, per)[0][part.first]
            into = matrix.packed_zeros[entry_index(part, slice(first, first + rows.stop - rows.start))]
            shape = -(-size // per), shape[1]
            yield "weight_zero_point", Destination(into=into, shape=shape, index=(rows, groups), dtype=torch.int32)
        if self.has_act_order:
            into = matrix.g_idx[entry_index(part, number)]
            yield "weight_g_idx", Destination(into=into, shape=(columns,), index=(part.columns,), dtype=torch.int32)

    def finish(self, matrix: Any) -> None:
        for part, shape in zip(matrix.parts, matrix.shapes.flatten(0, -2).tolist(), strict=True):
            if tuple(shape) != part.shape:
                raise ValueError(
                    f"{part.source(matrix.name)}.weight_shape is {shape}, expected {list(part.shape)} by config.json"
                )
        zeros = self._zeros(matrix) if self.has_zeros else None
        scales, order = narrow_scales(matrix.scales.data), matrix.g_idx.data if self.has_act_order else None
        self.lay_out(matrix, matrix.words.data, scales, zeros, order)

    def _zeros(self, matrix: Any) -> Tensor:
        zeros = torch.zeros(matrix.scales.shape, dtype=torch.uint8, device=matrix.scales.device)
        first = part_starts(matrix, self.per_word)[0]
        for part in entry_parts(matrix):
            place = part.place[-1]
            assert isinstance(place, slice)
            count = place.stop - place.start
            stored = matrix.packed_zeros[..., first[part.first] : first[part.first] + -(-count // self.per_word), :]
            zeros[..., place, :] = unpacked(stored.mT, self.bits, count).mT
        return zeros
