"""A matrix of a model, and the format that its values are stored in.

A model is first a skeleton: its layers know how large their matrices are and which shard of them this rank has. The
loader then gives every matrix a `Format`, by its name in the checkpoint. The format creates the parameters, states
where the checkpoint's tensors go in them, and computes products. Neither models nor the engine know which formats
exist; `whorl.nn.weights` has the table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from whorl import ops

from .ranks import Unit

Index = tuple[slice, ...]
FEW = 8  # tokens: up to so many, a norm may be fused into the product behind it


class Norm(Protocol):
    """A norm layer that returns norm(x + residual) and x + residual, such as `whorl.nn.RMSNorm`."""

    weight: Tensor
    eps: float
    plus_one: bool

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]: ...


class Routing(NamedTuple):
    """Where the rows of a stack's matmul come from, as `ops.permute` returns it: sorted by the matrix of the stack.

    places: [T, K], the row of each token's choices; counts: [E], the rows of each matrix.
    """

    places: Tensor
    counts: Tensor


class Adapter(Protocol):
    """What is added to the products of one matrix, such as low-rank updates that requests choose.

    y: the product [rows, N] of x [rows, K] with the matrix. routing: of the rows, for a stack of matrices; elsewhere
    None, and the rows are those of the step. Returns the sum, y's rows and dtype. It must compute a row from that row
    alone, in an order that does not depend on the others.
    """

    def __call__(self, y: Tensor, x: Tensor, routing: Routing | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """The destination of a checkpoint's tensor: tensor[index] is copied to `into`, a view of a parameter.

    dtype: the tensor must have this dtype, and values are copied as they are; None: any floating point dtype of 16 bits
    or more, or one of `also`, is converted. more: destinations for other parts of the same tensor, where a rank's shard
    is not one contiguous range of it. default: the value that fills `into` when the checkpoint has no such tensor;
    None: it must have one. is_either_way: the last two dims may be transposed in the file; where they are equal, they
    are taken as they are. A tensor of one number may have any number of dims.
    """

    into: Tensor
    shape: tuple[int, ...]  # of the full tensor in the checkpoint
    index: Index
    dtype: torch.dtype | None = None
    also: tuple[torch.dtype, ...] = ()
    default: int | None = None
    more: "tuple[Destination, ...]" = ()
    is_either_way: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape can be copied."""
        return shape == self.shape or self.is_exchanged(shape) or math.prod(shape) == math.prod(self.shape) == 1

    @property
    def parts(self) -> "tuple[Destination, ...]":
        """This destination and those of the other parts of its tensor."""
        return (self, *self.more)

    def tensor(self) -> Tensor:
        """Return the checkpoint's tensor, as far as this rank has it; zeros elsewhere."""
        if not self.more:
            return self.into.clone()
        whole = self.into.new_zeros(self.shape)
        for part in self.parts:
            whole[part.index] = part.into
        return whole

    def is_exchanged(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape has its last two dims transposed."""
        return self.is_either_way and shape != self.shape and shape == (*self.shape[:-2], *self.shape[:-3:-1])


def by_tensor(named: Iterable[tuple[str, Destination]]) -> dict[str, Destination]:
    """Return destinations by name; those of one tensor are joined, in their order."""
    joined: dict[str, Destination] = {}
    for name, destination in named:
        first = joined.get(name)
        joined[name] = destination if first is None else replace(first, more=(*first.more, *destination.parts))
    return joined


# The forms in which the same values may come: of each, all its destinations by Hugging Face's names.
Forms = tuple[dict[str, Destination], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A projection of the checkpoint, and which part of it this rank has in a matrix."""

    name: str  # its name in the checkpoint, where the matrix has several projections; "": that of the matrix
    shape: tuple[int, int]  # of the full projection
    rows: slice  # this rank's
    columns: slice
    first: int = 0  # row of the matrix at which the projection begins
    entry: int | None = None  # in a stack of matrices, the index of the one it belongs to: its expert

    @property
    def place(self) -> tuple[int | slice, ...]:
        """The index of the projection's rows in the matrix."""
        rows = slice(self.first, self.first + self.rows.stop - self.rows.start)
        return (rows,) if self.entry is None else (self.entry, rows)

    def source(self, name: str) -> str:
        """Return the projection's name in the checkpoint; name: that of the matrix."""
        return f"{name.rpartition('.')[0]}.{self.name}" if self.name else name


class Format(ABC):
    """How the values of matrices are stored, and how products with them are computed.

    A format that implements `values` works everywhere; products of its own make it faster.
    """

    unit = Unit()  # rows and columns that shards must not separate
    is_weight_only = True  # products equal those of `values`, so the matrix may be unpacked to the model's dtype
    has_weight = False  # values lie in a parameter `weight` of the matrix's shape

    @property
    def multiplies_codes(self) -> bool:
        """Whether products quantize their input by `ops.dynamic_quant`."""
        return False

    @abstractmethod
    def tensors(self, matrix: "Matrix") -> dict[str, Tensor]:
        """Return the parameters of a matrix by name, not initialised."""

    @abstractmethod
    def destinations(self, matrix: "Matrix", part: Part) -> Iterator[tuple[str, Destination]]:
        """Yield every tensor that the checkpoint has for a part, by the end of its name, such as "weight"."""

    @abstractmethod
    def values(self, matrix: "Matrix") -> Tensor:
        """Return the values, in matrix.shape and the model's dtype."""

    @abstractmethod
    def randomize(self, matrix: "Matrix", generator: torch.Generator) -> None:
        """Fill the parameters with random values of variance 1 / columns."""

    def finish(self, matrix: "Matrix") -> None:  # noqa: B027 (most have nothing to do)
        """Rearrange the parameters for the kernels, after the checkpoint's tensors have been copied."""

    def linear(self, matrix: "Matrix", x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, as `ops.linear` does."""
        return ops.linear.unchecked(x, self.values(matrix), bias)  # type: ignore[no-any-return]

    def norm_linear(
        self, matrix: "Matrix", norm: "Norm", x: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product of normed = norm(x + residual) with W, then normed, then x + residual."""
        normed, total = norm(x, residual)
        return self.linear(matrix, normed, bias), normed, total

    def for_kernels(self, matrix: "Matrix") -> Any:
        """Return the matrix as whorl's CPU kernels multiply it, plain, a `PackedMatrix` or a `PackedStack`; None: they
        do not."""
        return None

    def experts(self, gate_up: "Matrix", down: "Matrix", x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the output of the experts, as `ops.experts` does."""
        return ops.experts(x, self.values(gate_up), self.values(down), weights, ids)  # type: ignore[no-any-return]

    def grouped(self, stack: "Matrix", rows: Tensor, counts: Tensor) -> Tensor:
        """Return the product of rows, sorted by matrix, with the matrices of a stack, as `ops.grouped_matmul` does."""
        return ops.grouped_matmul(rows, self.values(stack), counts)  # type: ignore[no-any-return]

    def lookup(self, matrix: "Matrix", row_ids: Tensor) -> Tensor:
        """Return rows of the matrix, [T, columns]."""
        return nn.functional.embedding(row_ids, self.values(matrix))


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """The formats of a checkpoint.

    of: function from a module's name in the checkpoint to its format. unit: where shards of all of them may be cut.
    """

    of: Callable[[str], Format]
    unit: Unit = Unit()  # noqa: RUF009 (a tuple)
    ignored: tuple[str, ...] = ()  # ends of names of tensors that the checkpoint may have and that are not used


class Weighted(nn.Module):
    """A layer with weights. It is built without them; `create_parameters` makes them."""

    has_layers = False  # whether modules inside it are layers of their own

    def elsewhere(self, name: str) -> Iterable[str]:
        """Return how the names of tensors begin that the layer has on other ranks only; name: of the layer."""
        return ()

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        """Create the parameters, not initialised; name: of the layer in the model, dtype: the model's."""
        raise NotImplementedError

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        """Yield the destination of each tensor of the checkpoint, by its name."""
        raise NotImplementedError

    def forms(self, name: str) -> Iterator[Forms]:
        """Yield the layer's parts that a trainer sends separately: of each, the forms that its tensors may have."""
        yield (dict(self.destinations(name)),)

    def randomize(self, generator: torch.Generator) -> None:
        """Fill the parameters with random values."""
        raise NotImplementedError

    def finish(self) -> None:
        """Rearrange the parameters for the kernels, after the checkpoint's tensors have been copied."""

    def unpack(self, plain: Format) -> None:
        """Replace quantised weights by their values in the model's dtype, if that does not change products.

        plain: the format that stores such values.
        """

    def step_bytes(self, batch: int) -> float:
        """Return the bytes of weights that a decode step of `batch` sequences reads."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def num_values(self) -> int:
        """The number of the model's weights that this rank has here, however they are stored."""
        return sum(parameter.numel() for parameter in self.parameters())

    def prompt_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of the matrix products of a prompt; other work is negligible."""
        return 0


class Plain(Weighted):
    """A layer whose parameters every rank has as a whole, and in a plain dtype whatever the format of matrices.

    shapes: of the parameters, by name.
    """

    weight: Tensor
    bias: Tensor
    dtype: torch.dtype | None = None  # of the parameters; None: the model's
    sources: Mapping[str, str] = MappingProxyType({})  # names in the checkpoint, where they are others

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes = shapes

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        for key, shape in self.shapes.items():
            values = torch.empty(shape, dtype=self.dtype or dtype)
            self.register_parameter(key, nn.Parameter(values, requires_grad=False))

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for key, shape in self.shapes.items():
            index = tuple(slice(0, size) for size in shape)
            destination = Destination(into=getattr(self, key), shape=shape, index=index)
            yield f"{name}.{self.sources.get(key, key)}", destination


class Matrix(Weighted):
    """A matrix that has one or several projections of a checkpoint, one below the other; or a stack of such matrices.

    shape: this rank's [rows, columns], or [E, rows, columns] of a stack. parts: its projections, in their order.
    Attribute adapter: what is added to its products; None: nothing.
    """

    adapter: Adapter | None = None
    takes_adapters = True  # it multiplies as a whole, so that something can be added to the product

    format: Format
    name: str  # in the model
    dtype: torch.dtype  # the model's
    weight: Tensor  # in formats that have a parameter of this name

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        super().__init__()
        self.shape, self.parts = tuple(shape), tuple(parts)

    @property
    def lead(self) -> tuple[int, ...]:
        """The dims before rows and columns: () for a single matrix."""
        return self.shape[:-2]

    @property
    def entry_parts(self) -> list[Part]:
        """Its parts, or those of the first matrix of a stack; the others have theirs at the same rows."""
        return list(takewhile(lambda part: part.entry == self.parts[0].entry, self.parts))

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        first, *other_names = (part.source(name) for part in self.parts)
        self.format, self.name, self.dtype = formats.of(first), name, dtype
        if (
            different := next((other_name for other_name in other_names if formats.of(other_name) != self.format), None)
        ) is not None:
            raise ValueError(
                f"{first} and {different} are stored as one matrix, and the checkpoint has them in different formats: "
                f"{self.format} and {formats.of(different)}"
            )
        self._check_cuts(name)
        for key, tensor in self.format.tensors(self).items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    def _check_cuts(self, name: str) -> None:
        for part in self.parts:
            cuts = (part.rows, part.columns)
            for dim, cut, size, unit in zip(("rows", "columns"), cuts, part.shape, self.format.unit, strict=True):
                if cut.start % unit or (cut.stop % unit and cut.stop != size):
                    raise ValueError(
                        f"{part.source(name)}: this rank's share, or a part of that share, is {dim} {cut.start} to "
                        f"{cut.stop} of {size}, and the weights are in units of {unit} {dim}, which cannot be cut: "
                        f"take fewer tensor-parallel ranks (--tp), so that each has complete units, or a checkpoint "
                        f"that leaves this layer unquantised"
                    )

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        parts = ((part.source(name), self.format.destinations(self, part)) for part in self.parts)
        yield from by_tensor((f"{source}.{end}", to) for source, ends in parts for end, to in ends).items()

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
        """Replace all parameters but the bias by these."""
        note_change()
        for key in [key for key in self._parameters if key != "bias"]:
            delattr(self, key)
        for key, tensor in tensors.items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def prompt_flops(self, num_tokens: int) -> float:
        return 2 * math.prod(self.shape) * num_tokens


_num_changes = 0


def changes() -> int:
    """Return a number that grows whenever a matrix gets other parameters, or parameters are elsewhere in memory."""
    return _num_changes


def note_change() -> None:
    global _num_changes
    _num_changes += 1


def weighted(model: nn.Module, name: str = "") -> Iterator[tuple[str, Weighted]]:
    """Yield the layers of a model that have weights, by name, in the model's order.

    Modules inside such a layer are listed only where it says so (`has_layers`).
    """
    if isinstance(model, Weighted):
        yield name, model
        if not model.has_layers:
            return
    for child_name, child in model.named_children():
        yield from weighted(child, f"{name}.{child_name}" if name else child_name)


def create_parameters(model: nn.Module, formats: Formats, dtype: torch.dtype) -> None:
    """Create every layer's parameters, on the current device, not initialised."""
    for name, layer in weighted(model):
        layer.create_parameters(name, formats, dtype)


def destinations(model: nn.Module) -> dict[str, Destination]:
    """Return the destination of every tensor that a checkpoint must have for this model, by Hugging Face's name."""
    return {source: destination for name, layer in weighted(model) for source, destination in layer.destinations(name)}
