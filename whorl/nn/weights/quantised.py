"""What formats that hold fewer bits have in common: products by way of values, a piece of the matrix at a time."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from whorl import ops
from whorl.device import HOST
from whorl.nn.weight import Format, Matrix, Part

from . import laid_out

TILE_VALUES = 1 << 23  # of a matrix, unpacked at a time on a CPU: 32 MiB in fp32
ONE_EACH = 1 << 62  # more rows than a part has
SCALES = (torch.bfloat16, torch.float16)  # what fp32 scales become where they lose nothing

Pick = slice | Tensor


class Quantised(Format):
    """A product of a weight-only format equals `ops.linear` of x and the values, which are rounded to the model's
    dtype. On a CPU values are unpacked a tile of rows, or the chosen experts, at a time, to the same bits. Elsewhere
    kernels read what is packed, and cut K into chunks of 1024, as `ops.packed_linear` says."""

    @abstractmethod
    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        """The values of some rows of a matrix, or of some entries of a stack, in the model's dtype."""

    def values(self, matrix: Matrix) -> Tensor:
        return self.values_of(matrix, slice(None))

    def linear(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if laid_out.layout_of(matrix) is not None:
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
        if laid_out.layout_of(gate_up) is not None:
            return laid_out.experts(gate_up, down, x, weights, ids)
        if x.device.type != HOST:
            return super().experts(gate_up, down, x, weights, ids)
        used, places = ids.unique(return_inverse=True)  # of a CPU, which does not wait for the number of them
        chosen = (self.values_of(each, used) for each in (gate_up, down))
        return ops.experts(x, *chosen, weights, places)  # type: ignore[no-any-return]

    def lookup(self, matrix: Matrix, row_ids: Tensor) -> Tensor:
        return self.values_of(matrix, row_ids)


def tiles(count: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


# ---- where the parts of a matrix stand in parameters that have fewer rows than it


def of_one_entry(matrix: Matrix) -> list[Part]:
    """The parts of a matrix, or of the first of a stack: the others have theirs at the same places."""
    return list(takewhile(lambda part: part.entry == matrix.parts[0].entry, matrix.parts))


def starts(matrix: Matrix, size: int) -> tuple[dict[int, int], int]:
    """Each part has a row of a parameter for every `size` of its rows, the last for fewer. Where they begin, by the
    part's first row in the matrix, and how many there are in all."""
    found, total = {}, 0
    for part in of_one_entry(matrix):
        found[part.first] = total
        total += -(-(part.rows.stop - part.rows.start) // size)
    return found, total


def entries(matrix: Matrix) -> tuple[int, ...]:
    """The dimensions before rows and columns."""
    return matrix.shape[:-2]


def stacked(part: Part, *index: int | slice) -> tuple[int | slice, ...]:
    """An index into the part's own of a stack."""
    return index if part.entry is None else (part.entry, *index)


def units(cut: slice, size: int) -> slice:
    """A cut of rows or columns in units of `size`; the last may be cut short."""
    return slice(cut.start // size, -(-cut.stop // size))


def narrowed(scales: Tensor) -> Tensor:
    """In 16 bits where they lose nothing: most checkpoints have them so."""
    for dtype in SCALES:
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype)
    return scales


# ---- what config.json says


def setting(settings: Mapping[str, Any], kind: type, default: Any, *names: str) -> Any:
    """The first of these names that has a value."""
    name, value = next(((n, settings[n]) for n in names if settings.get(n) is not None), (names[0], default))
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"quantization_config: {name} is {value!r}, expected {kind.__name__}")
    return value


def names(settings: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """A list of names."""
    found = setting(settings, list, [], *keys)
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"quantization_config: {keys[0]} is {str(found)[:60]}, expected a list of names")
    return tuple(found)


def one_of(settings: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> Any:
    value = settings.get(name)
    value = default if value is None else value
    if not any(value == each and type(value) is type(each) for each in known):
        raise ValueError(f"quantization_config: {name} is {value!r}; known here are {', '.join(map(repr, known))}")
    return value


def never_quantised(name: str) -> bool:
    """The embedding, the router and an indexer's weights of heads, which quantisers leave alone without saying so."""
    return name.endswith(("embed_tokens", "mlp.gate", "indexer.weights_proj"))


def is_of_a_tower(name: str) -> bool:
    """Whether it belongs to the vision tower, which AWQ and GPTQ leave as it is, not all of them saying so: they go
    through the layers of the text."""
    return ".visual." in f".{name}."


def is_listed(name: str, kept: tuple[str, ...]) -> bool:
    """Whether a list of modules that are not quantised has this one, by its whole name or some whole words of it."""
    return any(f".{each.strip('.')}." in f".{name}." for each in kept)
