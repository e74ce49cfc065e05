"""What quantised formats have in common: products that unpack one tile of the matrix at a time."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import ops
from whorl.device import HOST
from whorl.nn.weight import Destination, Format, Matrix, Part
from whorl.ops.quantised.layout import Pick

from . import laid_out

TILE_VALUES = 1 << 23  # values unpacked at a time on a CPU: 32 MiB in fp32
ONE_EACH = 1 << 62  # `unit` of `part_starts` for parameters with one row per part: more rows than any part has
SCALES = (torch.bfloat16, torch.float16)  # dtypes that fp32 scales are narrowed to where that loses nothing


class Dim(NamedTuple):
    """A dim of a tensor that the checkpoint has for a part of a matrix. size: in the checkpoint; cut: this rank's share
    of it; place: where that lies in the parameter."""

    size: int
    cut: slice
    place: slice


SINGLE = Dim(1, slice(0, 1), slice(None))


class Quantised(Format):
    """A format of fewer bits.

    A product of a weight-only format equals `ops.linear` of x and the values, which are rounded to the model's dtype.
    On a CPU values are unpacked a tile of rows, or the chosen experts, at a time, to the same bits. On other devices
    kernels read the packed weight and split K into chunks of 1024, as `ops.packed_linear` describes.
    """

    @abstractmethod
    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        """Return the values of some rows of a matrix, or of some matrices of a stack, in the model's dtype."""

    def values(self, matrix: Matrix) -> Tensor:
        return self.values_of(matrix, slice(None))

    def linear(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if laid_out.packing_of(matrix) is not None:
            return laid_out.linear(matrix, x, bias)
        rows = TILE_VALUES // matrix.shape[-1]
        if x.device.type != HOST or matrix.shape[0] <= rows:
            return super().linear(matrix, x, bias)
        y = x.new_empty(x.shape[0], matrix.shape[0])
        for tile in tiles(matrix.shape[0], max(rows // 64 * 64, 64)):
            part = None if bias is None else bias[tile]
            y[:, tile] = ops.linear.unchecked(x, self.values_of(matrix, tile), part)
        return y

    def experts(self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        # A device's kernels may read one of the two and refuse the other, by its zero points or scales.
        if laid_out.packing_of(gate_up) is not None and laid_out.packing_of(down) is not None:
            return laid_out.experts(gate_up, down, x, weights, ids)
        if x.device.type != HOST:
            return super().experts(gate_up, down, x, weights, ids)
        # `unique` is used only on a CPU, because elsewhere its size would have to come from the device.
        used, ids_in_used = ids.unique(return_inverse=True)
        chosen = (self.values_of(matrix, used) for matrix in (gate_up, down))
        return ops.experts(x, *chosen, weights, ids_in_used)  # type: ignore[no-any-return]

    def lookup(self, matrix: Matrix, row_ids: Tensor) -> Tensor:
        return self.values_of(matrix, row_ids)

    # ---- the parts of a matrix in parameters, which may have fewer rows or columns than the matrix

    def part_starts(self, matrix: Matrix, unit: int) -> tuple[dict[int, int], int]:
        """Return at which row of a parameter each part begins, and how many rows the parameter has.

        The parameter has one row for every `unit` rows of a part, such as a row of scales; the last of a part may stand
        for fewer. The beginnings are keyed by `Part.first`, the part's first row in the matrix.
        """
        starts, total = {}, 0
        for part in matrix.entry_parts:
            starts[part.first] = total
            total += -(-(part.rows.stop - part.rows.start) // unit)
        return starts, total

    def rows_of(self, matrix: Matrix, part: Part, unit: int = 1) -> Dim:
        """Return the dim of a part's rows, in units of so many; the last unit of a part may be partial."""
        cut, first = _in_units(part.rows, unit), self.part_starts(matrix, unit)[0][part.first]
        return Dim(-(-part.shape[0] // unit), cut, slice(first, first + cut.stop - cut.start))

    def columns_of(self, part: Part, unit: int = 1) -> Dim:
        """Return the dim of a part's columns, in units of so many."""
        return Dim(-(-part.shape[1] // unit), _in_units(part.columns, unit), slice(None))

    def row_of(self, matrix: Matrix, parameter: Tensor, part: Part) -> Tensor:
        """Return the row of a part in a parameter [.., parts, n] that has one for each."""
        return parameter.select(-2, self.part_starts(matrix, ONE_EACH)[0][part.first])

    def destination(self, parameter: Tensor, part: Part, *dims: Dim, **options: Any) -> Destination:
        """Return the destination of a part's tensor in a parameter [.., *dims]. options: of `Destination`."""
        place: tuple[int | slice, ...] = tuple(dim.place for dim in dims)
        into = parameter[place if part.entry is None else (part.entry, *place)]
        shape = tuple(dim.size for dim in dims)
        return Destination(into=into, shape=shape, index=tuple(dim.cut for dim in dims), **options)

    def scales_by_row(self, matrix: Matrix, scales: Tensor) -> Tensor:
        """Return a scale for each row, [.., N], from one for each projection, [.., parts]."""
        by_row = torch.zeros(matrix.shape[:-1], dtype=torch.float32, device=scales.device)
        for part in matrix.entry_parts:
            by_row[..., self.rows_of(matrix, part).place] = scales[..., self.rows_of(matrix, part, ONE_EACH).place]
        return by_row


def _in_units(cut: slice, unit: int) -> slice:
    return slice(cut.start // unit, -(-cut.stop // unit))


def tiles(count: int, size: int) -> Iterator[slice]:
    """Return slices of `size` that cover `count`."""
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def narrow_scales(scales: Tensor) -> Tensor:
    """Return scales in 16 bits if that loses nothing, which is so in most checkpoints."""
    for dtype in SCALES:
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype)
    return scales


# ---- quantization_config of config.json


def setting(settings: Mapping[str, Any], kind: type, default: Any, *names: str) -> Any:
    """Return the value of the first of these names that has one; raises ValueError if it is not of type `kind`."""
    name, value = next(((n, settings[n]) for n in names if settings.get(n) is not None), (names[0], default))
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"quantization_config: {name} is {value!r}, expected {kind.__name__}")
    return value


def names(settings: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return a list of names; raises ValueError if it is something else."""
    values = setting(settings, list, [], *keys)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"quantization_config: {keys[0]} is {str(values)[:60]}, expected a list of names")
    return tuple(values)


def one_of(settings: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> Any:
    """Return a setting; raises ValueError if it is not one of `known`."""
    value = settings.get(name)
    value = default if value is None else value
    if not any(value == allowed and type(value) is type(allowed) for allowed in known):
        raise ValueError(f"quantization_config: {name} is {value!r}, expected one of {', '.join(map(repr, known))}")
    return value


# Ends of the names of modules that quantisers always skip: the embedding, the router, an indexer's weights of heads,
# and the gates of a recurrence and of a shared expert.
NEVER_QUANTISED = (
    *("embed_tokens", "mlp.gate", "indexer.weights_proj", "mlp.shared_expert_gate"),
    *(f"linear_attn.in_proj_{gate}" for gate in ("a", "b", "ba")),
)


def never_quantised(name: str) -> bool:
    """Return whether quantisers always skip this module."""
    return name.endswith(NEVER_QUANTISED)


def is_in_vision_tower(name: str) -> bool:
    """Return whether a module belongs to the vision tower.

    AWQ and GPTQ quantise the layers of the text only, and not all of their checkpoints say so.
    """
    return ".visual." in f".{name}."


def is_listed(name: str, modules: tuple[str, ...]) -> bool:
    """Return whether a list of unquantised modules has this one, by its full name or some full words of it."""
    return any(f".{module.strip('.')}." in f".{name}." for module in modules)
