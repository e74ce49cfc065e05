"""A matrix of a model, and the format that its values are held in.

A model is first a skeleton: its layers know how large their matrices are and which part of them this rank has. The
loader then gives every matrix a `Format`, by its name in the checkpoint, and the format does the rest: it makes the
parameters, says where the checkpoint's tensors go in them, and multiplies. Neither models nor the engine know which
formats there are; `whorl.nn.weights` has the table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from whorl import ops

from .ranks import Unit

Index = tuple[slice, ...]
FEW = 8  # rows in front of which a norm may be part of the product


class Norm(Protocol):
    """Of a row and what is added to it before."""

    weight: Tensor
    eps: float
    plus_one: bool

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes: its `index` part is copied `into` a view of a parameter.

    dtype: how it must be stored, to be copied as it is; None: in any floating point dtype of 16 bits or more, or in one
    of `also`, and it is converted. more: other parts of the same tensor, where what goes into a rank's parameter is not
    one run of it. default: what `into` is filled with where the checkpoint has no such tensor; None: it must have one.
    is_either_way: the last two dims may be exchanged in the file; where they are equal, they are not.
    A tensor of one number may be stored in any number of dimensions.
    """

    into: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: Index
    dtype: torch.dtype | None = None
    also: tuple[torch.dtype, ...] = ()
    default: int | None = None
    more: "tuple[Slot, ...]" = ()
    is_either_way: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be it."""
        return shape == self.shape or self.is_exchanged(shape) or math.prod(shape) == math.prod(self.shape) == 1

    def is_exchanged(self, shape: tuple[int, ...]) -> bool:
        """Whether the last two dims of this shape are the wrong way round."""
        return self.is_either_way and shape != self.shape and shape == (*self.shape[:-2], *self.shape[:-3:-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A projection of the checkpoint, and what of it a matrix holds."""

    name: str  # its own, where the matrix holds several projections; "": that of the matrix
    shape: tuple[int, int]  # of the whole projection
    rows: slice  # that this rank has
    columns: slice
    first: int = 0  # row of the matrix in which its rows begin
    entry: int | None = None  # of a stack of matrices

    @property
    def place(self) -> tuple[int | slice, ...]:
        """Its rows in the matrix."""
        rows = slice(self.first, self.first + self.rows.stop - self.rows.start)
        return (rows,) if self.entry is None else (self.entry, rows)

    def source(self, name: str) -> str:
        """Its name in the checkpoint, as a part of the matrix of this name."""
        return f"{name.rpartition('.')[0]}.{self.name}" if self.name else name


class Format(ABC):
    """How matrices are held. One that says what its values are can do everything; products of its own are faster."""

    unit = Unit()
    is_weight_only = True  # its products are those of its values, so that values in the model's dtype may replace it

    @abstractmethod
    def tensors(self, matrix: "Matrix") -> dict[str, Tensor]:
        """The parameters of a matrix by name, not initialised."""

    @abstractmethod
    def slots(self, matrix: "Matrix", part: Part) -> Iterator[tuple[str, Slot]]:
        """Every tensor that the checkpoint has for a part, by the end of its name, such as "weight"."""

    @abstractmethod
    def values(self, matrix: "Matrix") -> Tensor:
        """matrix.shape, in the model's dtype."""

    @abstractmethod
    def randomize(self, matrix: "Matrix", generator: torch.Generator) -> None:
        """Fill the parameters so that values are normal, with a variance of 1 / columns."""

    def finish(self, matrix: "Matrix") -> None:  # noqa: B027 (most have nothing to do)
        """The checkpoint's tensors are in: parameters may be laid out anew."""

    def linear(self, matrix: "Matrix", x: Tensor, bias: Tensor | None) -> Tensor:
        """As `ops.linear`."""
        return ops.linear.unchecked(x, self.values(matrix), bias)  # type: ignore[no-any-return]

    def norm_linear(
        self, matrix: "Matrix", norm: "Norm", x: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The product of norm(x + residual), that norm and that sum."""
        normed, total = norm(x, residual)
        return self.linear(matrix, normed, bias), normed, total

    def experts(self, gate_up: "Matrix", down: "Matrix", x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `ops.experts`."""
        return ops.experts(x, self.values(gate_up), self.values(down), weights, ids)  # type: ignore[no-any-return]

    def lookup(self, matrix: "Matrix", row_ids: Tensor) -> Tensor:
        """Rows of the matrix, [T, columns]."""
        return nn.functional.embedding(row_ids, self.values(matrix))


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """Of a checkpoint: the format of each module, by its name there, and where shares of all of them may be cut."""

    of: Callable[[str], Format]
    unit: Unit = Unit()  # noqa: RUF009 (a tuple)
    ignored: tuple[str, ...] = ()  # ends of the names of tensors that the checkpoint may have and nothing here uses


class Weighted(nn.Module):
    """A layer with weights. It is made without them: `hold` makes its parameters."""

    def hold(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        """name: of the layer in the model; dtype: the model's."""
        raise NotImplementedError

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Where each tensor of the checkpoint goes, by its name."""
        raise NotImplementedError

    def randomize(self, generator: torch.Generator) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Called when a checkpoint's tensors have been copied."""

    def unpack(self, plain: Format) -> None:
        """Replace quantised weights by their values in the model's dtype, where products are the same. plain: the
        format that holds such values."""

    def step_bytes(self, batch: int) -> float:
        """That a decode step of `batch` sequences reads."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def num_values(self) -> int:
        """Numbers of the model that this rank has here, however they are held."""
        return sum(parameter.numel() for parameter in self.parameters())

    def prompt_flops(self, num_tokens: int) -> float:
        """Of the products that a prompt needs; the rest is nothing beside them."""
        return 0


class Matrix(Weighted):
    """[rows, columns], or a stack of such: one or several projections of a checkpoint as one weight."""

    format: Format
    name: str  # in the model
    dtype: torch.dtype  # the model's
    weight: Tensor  # in formats that have a parameter of this name

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        super().__init__()
        self.shape, self.parts = tuple(shape), tuple(parts)

    def hold(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        first, *others = (part.source(name) for part in self.parts)
        self.format, self.name, self.dtype = formats.of(first), name, dtype
        if (odd := next((other for other in others if formats.of(other) != self.format), None)) is not None:
            raise ValueError(
                f"{first} and {odd} are one matrix here, and the checkpoint has them in different formats: "
                f"{self.format} and {formats.of(odd)}"
            )
        self._check_cuts(name)
        for key, tensor in self.format.tensors(self).items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    def _check_cuts(self, name: str) -> None:
        for part in self.parts:
            cuts = (part.rows, part.columns)
            for what, cut, size, unit in zip(("rows", "columns"), cuts, part.shape, self.format.unit, strict=True):
                if cut.start % unit or (cut.stop % unit and cut.stop != size):
                    raise ValueError(
                        f"tensor parallel: {part.source(name)}: this rank's share is {what} {cut.start} to {cut.stop} "
                        f"of {size}, and the weights are in units of {unit} {what}, which cannot be cut: take fewer "
                        f"ranks, so that each has whole units"
                    )

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        for part in self.parts:
            source = part.source(name)
            for end, slot in self.format.slots(self, part):
                yield f"{source}.{end}", slot

    def randomize(self, generator: torch.Generator) -> None:
        self.format.randomize(self, generator)

    def finish(self) -> None:
        self.format.finish(self)

    def unpack(self, plain: Format) -> None:
        if self.format != plain and self.format.is_weight_only:
            self.replace(weight=self.format.values(self))
            self.format = plain
            self.format.finish(self)

    def replace(self, **tensors: Tensor) -> None:
        """Hold these parameters, and none of those that the format had asked for."""
        for key in [key for key in self._parameters if key != "bias"]:
            delattr(self, key)
        for key, tensor in tensors.items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def prompt_flops(self, num_tokens: int) -> float:
        return 2 * math.prod(self.shape) * num_tokens


def weighted(model: nn.Module, name: str = "") -> Iterator[tuple[str, Weighted]]:
    """The layers of a model that have weights, by name, in its order. What a layer has inside is its own affair."""
    if isinstance(model, Weighted):
        yield name, model
        return
    for child_name, child in model.named_children():
        yield from weighted(child, f"{name}.{child_name}" if name else child_name)


def hold(model: nn.Module, formats: Formats, dtype: torch.dtype) -> None:
    """Make every layer's parameters, on the device at hand, not initialised."""
    for name, layer in weighted(model):
        layer.hold(name, formats, dtype)


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every tensor a checkpoint must hold for this model, by Hugging Face's name."""
    return {source: slot for name, layer in weighted(model) for source, slot in layer.slots(name)}
