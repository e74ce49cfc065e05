"""An operator's contract as data: what the signature of its reference states of shapes, dtypes and ranges.

    def linear(
        x: Annotated[Tensor, "[T, K] float"],
        weight: Annotated[Tensor, "[N, K] x"],
        bias: Annotated[Tensor | None, "[N] x or fp32"] = None,
    ) -> Annotated[Tensor, "[T, N] x"]:

The checks of every call and the fake (meta) implementation follow from it. A tensor's statement is

    [dims] dtypes, from LOW to HIGH, contiguous, constant; what to do

of which all after the dtypes may be left out.

dims: sizes. A letter is one size throughout the signature, and so is an integer argument by its name; `2*F` is an even
size, `G*HK` a multiple of HK, `V>0` a size that is not 0; a leading `...` is any number of sizes, the same ones
everywhere, and so is a leading `*P`, the same ones wherever it says `*P`.
dtypes: one or several, with "or". `float` is any floating point dtype of 16 bits or more, `int` is int32 or int64,
`any` is any; the name of another tensor is that tensor's dtype, and the name of a dtype argument is that dtype. fp32 is
fp64 where the first `float` tensor is: tests compare with fp64.
from LOW, up to HIGH or both: the lowest and highest value, checked only where that does not wait for a device.
constant: it may not require a gradient.
what to do: the end of the message where the sizes or dtypes do not fit.

The statement of a number is `> 0`, `>= 0` or, with any expressions of sizes, `1 to E`.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from ._tracing import is_readable

Values = dict[str, Any]
Sizes = dict[str, Any]  # sizes by letter; those of "..." and "*P" are a tuple

LEADING = "..."
NAMED = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
_TENSOR = re.compile(
    r"\[(?P<dims>[^]]*)\] (?P<kinds>\w+(?: or \w+)*)"
    r"(?:, from (?P<low>[^,;]+?))?(?:,? (?:up )?to (?P<high>[^,;]+))?"
    r"(?P<contiguous>, contiguous)?(?P<constant>, constant)?(?:; (?P<hint>.+))?"
)
_RANGE = re.compile(r"(?P<low>.+) to (?P<high>.+)")


# ---- sizes


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of products of letters. terms: each product's number and letters. is_positive: it may not be 0."""

    text: str
    terms: tuple[tuple[int, tuple[str, ...]], ...]
    is_positive: bool = False

    @classmethod
    def parse(cls, text: str) -> "Expression":
        text, positive, _ = text.strip().partition(">0")
        return cls(text, tuple(_terms(ast.parse(text, mode="eval").body)), is_positive=bool(positive))

    def unknowns(self, sizes: Sizes) -> list[str]:
        """Return its letters that have no size yet."""
        return list({letter: None for _, letters in self.terms for letter in letters if letter not in sizes})

    def value(self, sizes: Sizes) -> Any:
        """Return its value; all its letters must be known."""
        return sum(_product(number, letters, sizes) for number, letters in self.terms)

    def fits(self, size: Any, sizes: Sizes) -> bool:
        """Return whether it can be `size`, and set the one letter that it may have without a size."""
        if self.is_positive and size < 1:
            return False
        return self.solve(size, sizes) if self.unknowns(sizes) else bool(self.value(sizes) == size)

    def solve(self, size: Any, sizes: Sizes) -> bool:
        """Set its one unknown letter so that the value is `size`; return whether a whole number does that."""
        (unknown,) = self.unknowns(sizes)
        factor, rest = 0, size
        for number, letters in self.terms:
            if unknown in letters:
                factor = factor + _product(number, [letter for letter in letters if letter != unknown], sizes)
            else:
                rest = rest - _product(number, letters, sizes)
        if factor < 1 or rest < 0 or rest % factor:
            return False
        sizes[unknown] = rest // factor
        return True

    def render(self, sizes: Sizes) -> str:
        """Return its value, or its text with the sizes that are known."""
        if not self.unknowns(sizes) and not (self.is_positive and self.value(sizes) < 1):
            return str(self.value(sizes))
        if self.is_positive:
            return f"{self.text} > 0"
        return re.sub(r"[A-Za-z_]\w*", lambda letter: str(sizes.get(letter[0], letter[0])), self.text)


def _product(number: int, letters: Sequence[str], sizes: Sizes) -> Any:
    for letter in letters:
        number = number * sizes[letter]
    return number


def _terms(node: ast.expr) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the terms of a parsed sum, difference or product."""
    match node:
        case ast.Constant(value=int(number)):
            yield number, ()
        case ast.Name(id=letter):
            yield 1, (letter,)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield from ((-number, letters) for number, letters in _terms(operand))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (*_terms(left), *_terms(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield from (*_terms(left), *_terms(ast.UnaryOp(ast.USub(), right)))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            yield from ((n * m, (*a, *b)) for n, a in _terms(left) for m, b in _terms(right))
        case _:
            raise SyntaxError(f"{ast.unparse(node)!r} is no sum or product of letters and numbers")


# ---- statements


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and the highest value that an argument may have; None: any."""

    low: Expression | None
    high: Expression | None
    is_open: bool = False  # the lowest value itself is excluded

    @classmethod
    def parse(cls, text: str) -> "Bounds":
        if text in ("> 0", ">= 0"):
            return cls(Expression.parse("0"), None, is_open=text == "> 0")
        match = _RANGE.fullmatch(text)
        if match is None:
            raise SyntaxError(f"{text!r}, expected '> 0', '>= 0' or 'LOW to HIGH'")
        return cls.between(match["low"], match["high"])

    @classmethod
    def between(cls, low: str | None, high: str | None) -> "Bounds":
        first, last = (None if end is None else Expression.parse(end) for end in (low, high))
        return cls(first, last)

    def contain(self, low: Any, high: Any, sizes: Sizes) -> bool:
        """Return whether values from `low` to `high` are allowed. No number is a NaN."""
        if self.low is not None and not (low > self.low.value(sizes) if self.is_open else low >= self.low.value(sizes)):
            return False
        return self.high is None or high <= self.high.value(sizes)

    def render(self, sizes: Sizes) -> str:
        if self.high is None:
            assert self.low is not None
            return "a positive number" if self.is_open else f"{self.low.render(sizes)} or more"
        if self.low is None:
            return f"{self.high.render(sizes)} at most"
        return f"{self.low.render(sizes)} to {self.high.render(sizes)}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the signature states of one tensor."""

    name: str
    leading: str  # "..." or "*P" where the dims begin so, else ""
    dims: tuple[Expression, ...]
    kinds: tuple[str, ...]
    bounds: Bounds | None
    is_contiguous: bool
    is_constant: bool
    hint: str  # what to do where it does not fit
    is_optional: bool = False  # it may be None

    @classmethod
    def parse(cls, name: str, text: str, *, is_optional: bool = False) -> "TensorSpec":
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise SyntaxError(f"{name} is stated as {text!r}, expected '[dims] dtypes, ...' as in _spec.py")
        dims = [dim.strip() for dim in match["dims"].split(",") if dim.strip()]
        leading = dims.pop(0) if dims and dims[0].startswith((LEADING, "*")) else ""
        return cls(
            name=name,
            leading=leading,
            dims=tuple(Expression.parse(dim) for dim in dims),
            kinds=tuple(match["kinds"].split(" or ")),
            bounds=Bounds.between(match["low"], match["high"]) if match["low"] or match["high"] else None,
            is_contiguous=match["contiguous"] is not None,
            is_constant=match["constant"] is not None,
            hint=f"; {match['hint']}" if match["hint"] else "",
            is_optional=is_optional,
        )

    def fits(self, shape: Sequence[Any], sizes: Sizes, later: list[tuple["TensorSpec", Expression, Any]]) -> bool:
        """Compare a shape with the dims, and set the letters that it gives.

        later: gets the dims that have more than one unknown letter.
        """
        num_leading = len(shape) - len(self.dims)
        if num_leading < 0 or (num_leading and not self.leading):
            return False
        leading = tuple(shape[:num_leading])
        if self.leading and sizes.setdefault(self.leading, leading) != leading:
            return False
        for dim, size in zip(self.dims, shape[num_leading:], strict=True):
            if len(dim.unknowns(sizes)) > 1:
                later.append((self, dim, size))
            elif not dim.fits(size, sizes):
                return False
        return True

    def shape(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return its shape; all its letters must be known."""
        return (*(sizes[self.leading] if self.leading else ()), *(dim.value(sizes) for dim in self.dims))

    def render(self, sizes: Sizes, dtypes: dict[str, torch.dtype], wide: torch.dtype) -> str:
        """Return the statement with the sizes and dtypes that are known."""
        leading = [self.leading] if self.leading else []
        if self.leading in sizes:
            leading = [str(size) for size in sizes[self.leading]]
        dims = ", ".join([*leading, *(dim.render(sizes) for dim in self.dims)])
        names: dict[str, None] = {}
        for kind in self.kinds:
            names |= dict.fromkeys(_dtype_names(kind, dtypes, wide))
        return f"[{dims}] {' or '.join(names)}".rstrip()


def _dtype_names(kind: str, dtypes: dict[str, torch.dtype], wide: torch.dtype) -> list[str]:
    if kind == "any":
        return []
    if kind == "float":
        return ["floating point"]
    if kind == "int":
        return [str(dtype) for dtype in INTEGERS]
    return [str(wide if kind == "fp32" else NAMED.get(kind) or dtypes[kind])]


def _is_kind(dtype: torch.dtype, kind: str, dtypes: dict[str, torch.dtype], wide: torch.dtype) -> bool:
    if kind == "any":
        return True
    if kind == "float":
        return dtype in FLOATS
    if kind == "int":
        return dtype in INTEGERS
    if kind == "fp32":
        return dtype == wide
    return dtype == (NAMED.get(kind) or dtypes.get(kind))


@dataclass(slots=True)
class Spec:
    """What the signature of a reference states of its arguments and outputs."""

    operator: str
    signature: inspect.Signature  # without statements
    tensors: list[TensorSpec] = field(default_factory=list)
    numbers: list[tuple[str, Bounds]] = field(default_factory=list)
    letters: list[str] = field(default_factory=list)  # integer arguments, which dims may name
    outputs: list[TensorSpec] = field(default_factory=list)
    statements: dict[str, str] = field(default_factory=dict)  # as they are written, by argument and "returns"
    # Where bounds find their letters: a tensor and one of its dims, counted from the last. Values are compared in every
    # call, and solving all sizes takes longer than that. None: some letter is no size by itself.
    places: dict[str, tuple[str, int]] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it states every output and its dtype, so that the fake follows from it."""
        return bool(self.outputs) and all(len(spec.kinds) == 1 for spec in self.outputs)

    @property
    def reads_values(self) -> bool:
        """Whether some check reads tensor values."""
        return any(spec.bounds is not None for spec in self.tensors)

    def check(self, values: Values) -> None:
        """Raise ValueError for arguments that the signature excludes."""
        sizes, _ = self._solve(values)
        for spec in self.tensors:
            x = values[spec.name]
            if spec.is_contiguous and x is not None and not x.is_contiguous():
                raise ValueError(
                    f"{self.operator}: {spec.name} has strides {list(x.stride())}, expected a contiguous tensor"
                )
            if spec.is_constant and x is not None and x.requires_grad:
                raise ValueError(f"{self.operator}: {spec.name} requires a gradient, expected a constant{spec.hint}")
        for name, bounds in self.numbers:
            value = values[name]
            if value is not None and not bounds.contain(value, value, sizes):
                raise ValueError(f"{self.operator}: {name} is {value}, expected {bounds.render(sizes)}")
        self._check_values(values, sizes)

    def _solve(self, values: Values) -> tuple[Sizes, dict[str, torch.dtype]]:
        """Return all sizes, and the dtypes of the tensors. Raise ValueError for shapes and dtypes that do not fit."""
        sizes, dtypes = self._known(values)
        wide = self._wide(dtypes)
        later: list[tuple[TensorSpec, Expression, Any]] = []
        for spec in self.tensors:
            x = values[spec.name]
            if x is None and not spec.is_optional:
                raise ValueError(f"{self.operator}: {spec.name} is None, expected a tensor")
            if x is None:
                continue
            known, has_dtype = dict(sizes), any(_is_kind(x.dtype, kind, dtypes, wide) for kind in spec.kinds)
            fits = spec.fits(x.shape, sizes, later)
            if not fits or not has_dtype:
                self._refuse(spec, x, sizes if fits else known, dtypes)
        for spec, dim, size in later:
            if len(dim.unknowns(sizes)) > 1:  # the argument that would give one of them is absent
                continue
            if not dim.fits(size, sizes):
                self._refuse(spec, values[spec.name], sizes, dtypes)
        return sizes, dtypes

    def fake(self, values: Values, absent: Sequence[int] = ()) -> tuple[Tensor | None, ...]:
        """Return empty outputs of the shapes and dtypes that the signature states; absent: those that are None."""
        sizes, dtypes = self._solve(values)
        like, wide = next(v for v in values.values() if isinstance(v, Tensor)), self._wide(dtypes)
        empty: list[Tensor | None] = []
        for i, spec in enumerate(self.outputs):
            if i in absent:
                empty.append(None)
                continue
            (kind,) = spec.kinds
            dtype = wide if kind == "fp32" else NAMED.get(kind) or dtypes[kind]
            empty.append(like.new_empty(spec.shape(sizes), dtype=dtype))
        return tuple(empty)

    def count(self, expression: str, values: Values) -> int:
        """Return the value of an expression of sizes for these arguments."""
        sizes, _ = self._solve(values)
        return int(Expression.parse(expression).value(sizes))

    def shardings(self, values: Values) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
        """Return the DTensor placements of outputs and inputs where any of the dims "..." may be sharded.

        An input without these dims is replicated, and an output without them is a partial sum.
        """
        from torch.distributed.tensor import Partial, Replicate, Shard

        inputs = {spec.name: spec.leading for spec in self.tensors if values[spec.name] is not None}
        count = len(values[self.tensors[0].name].shape) - len(self.tensors[0].dims)
        return [
            (
                [place if spec.leading or place == Replicate() else Partial() for spec in self.outputs],
                {name: place if leading else Replicate() for name, leading in inputs.items()},
            )
            for place in (Replicate(), *map(Shard, range(count)))
        ]

    def check_values(self, values: Values) -> None:
        """Raise ValueError for tensor values outside their bounds, in calls whose shapes were checked before."""
        sizes = {name: values[name] for name in self.letters if values[name] is not None}
        if self.places is not None:
            sizes |= {letter: values[name].shape[at] for letter, (name, at) in self.places.items()}
        else:
            for spec in self.tensors:
                if values[spec.name] is not None:
                    spec.fits(values[spec.name].shape, sizes, [])
        self._check_values(values, sizes)

    def _check_values(self, values: Values, sizes: Sizes) -> None:
        for spec in self.tensors:
            x = values[spec.name]
            if spec.bounds is None or x is None or not x.numel() or not is_readable(x):
                continue
            low, high = (end.item() for end in x.aminmax())
            if not spec.bounds.contain(low, high, sizes):
                raise ValueError(
                    f"{self.operator}: {spec.name} has values from {low} to {high}, expected "
                    f"{spec.bounds.render(sizes)}"
                )

    def _known(self, values: Values) -> tuple[Sizes, dict[str, torch.dtype]]:
        """Return the sizes that are arguments, and the dtypes that are arguments or those of tensors."""
        sizes = {name: values[name] for name in self.letters if values[name] is not None}
        dtypes = {name: getattr(value, "dtype", value) for name, value in values.items()}
        return sizes, {name: dtype for name, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}

    def _wide(self, dtypes: dict[str, torch.dtype]) -> torch.dtype:
        """Return fp64 where the first `float` tensor is, else fp32."""
        first = next(
            (dtypes[spec.name] for spec in self.tensors if "float" in spec.kinds and spec.name in dtypes), None
        )
        return torch.float64 if first == torch.float64 else torch.float32

    def _refuse(self, spec: TensorSpec, x: Tensor, sizes: Sizes, dtypes: dict[str, torch.dtype]) -> None:
        expected = spec.render(sizes, dtypes, self._wide(dtypes))
        raise ValueError(f"{self.operator}: {spec.name} is {list(x.shape)} {x.dtype}, expected {expected}{spec.hint}")


def spec_of(reference: Callable[..., Any]) -> Spec:
    """Return what the signature of a reference states."""
    signature = inspect.signature(reference)
    returns = signature.return_annotation
    parts = typing.get_args(returns) if typing.get_origin(returns) is tuple else (returns,)
    plain = [p.replace(annotation=_plain(p.annotation)) for p in signature.parameters.values()]
    plain_returns = (
        types.GenericAlias(tuple, tuple(map(_plain, parts))) if typing.get_origin(returns) is tuple else _plain(returns)
    )
    spec = Spec(reference.__name__, signature.replace(parameters=plain, return_annotation=plain_returns))
    for parameter in signature.parameters.values():
        text, annotation = _statement(parameter.annotation), _plain(parameter.annotation)
        if text is not None:
            spec.statements[parameter.name] = text
        if text is not None and annotation in (Tensor, Tensor | None):
            spec.tensors.append(TensorSpec.parse(parameter.name, text, is_optional=annotation is not Tensor))
        elif text is not None:
            spec.numbers.append((parameter.name, Bounds.parse(text)))
        if annotation in (int, int | None):
            spec.letters.append(parameter.name)
    names = {tensor.name for tensor in spec.tensors}
    # Errors name what differs from the tensors that an operator is about: these come first, what is like others and
    # what may be absent last.
    spec.tensors.sort(
        key=lambda tensor: (tensor.is_optional, not names.isdisjoint(tensor.kinds), "float" not in tensor.kinds)
    )
    spec.places = _places(spec)
    outputs = [_statement(part) for part in parts]
    if None not in outputs:
        spec.statements["returns"] = "; ".join(filter(None, outputs))
        spec.outputs = [TensorSpec.parse(f"output {i}", text) for i, text in enumerate(outputs) if text is not None]
    return spec


def _places(spec: Spec) -> dict[str, tuple[str, int]] | None:
    """Return `Spec.places`."""
    ends = [end for x in spec.tensors if x.bounds is not None for end in (x.bounds.low, x.bounds.high)]
    needed = {letter for end in ends if end is not None for letter in end.unknowns(dict.fromkeys(spec.letters))}
    dims = [(x, i) for x in spec.tensors if not x.is_optional for i in range(-len(x.dims), 0)]
    places = {x.dims[i].text: (x.name, i) for x, i in dims if x.dims[i].text in needed}
    return places if places.keys() == needed else None


def _plain(annotation: Any) -> Any:
    """Return an annotation without its statement."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _statement(annotation: Any) -> str | None:
    return typing.get_args(annotation)[1] if typing.get_origin(annotation) is Annotated else None
