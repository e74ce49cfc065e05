"""Random arguments of an operator for tests and benchmarks, drawn by what its signature states.

A case names sizes by the letters of the signature, or by words that stand for some of its dims; "tokens" is T or the
leading dims, "shape" the shape of the tensor that the signature is about. It names further arguments by name: of a
tensor the shape, the dtype, the value of all its elements, or True for one that may be absent. A family of operators
adds only what is special: a function of the case, whose result has tensors, sizes by letter, and functions that draw a
tensor of a shape, such as `Draw.weight`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._spec import LEADING, NAMED, Bounds, Expression, Sizes, Spec, TensorSpec, Values

Special = Callable[..., Values]  # takes a Draw and those entries of a case that it names
MOST = 2**31 - 1  # the highest integer that is drawn where the signature states none


@dataclass(frozen=True, slots=True)
class Draw:
    """The settings that all tensors of a case share, and functions that draw them.

    scale: multiplies the values (below 1 in small-valued cases); sliced: tensors are slices of wider ones, so that the
    stride between rows is larger than a row, by 8 numbers or by this many.
    """

    dtype: torch.dtype
    device: str
    scale: float = 1.0
    sliced: int = False  # True: by 8

    @property
    def kind(self) -> Values:
        """The dtype and device as keywords of torch's constructors."""
        return {"dtype": self.dtype, "device": self.device}

    @property
    def wide(self) -> torch.dtype:
        """The dtype of arguments that an operator always takes in fp32; fp64 where a test computes in fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def gap(self) -> int:
        """How many unused numbers lie between two rows."""
        return 8 if self.sliced is True else int(self.sliced)

    def normal(self, *shape: int) -> Tensor:
        """Draw normal random numbers."""
        return torch.randn(*shape[:-1], shape[-1] + self.gap, **self.kind)[..., : shape[-1]]

    def scaled(self, *shape: int) -> Tensor:
        """Draw normal random numbers times the scale of the case."""
        return (self.scale * torch.randn(*shape[:-1], shape[-1] + self.gap, **self.kind))[..., : shape[-1]]

    def weight(self, *shape: int) -> Tensor:
        """Draw a layer's weight [..., N, K], scaled so that x @ weight.T is about as large as x; or that of a norm."""
        if len(shape) == 1:
            return 1 + 0.1 * torch.randn(*shape, **self.kind)
        return replace(self, scale=shape[-1] ** -0.5).scaled(*shape)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        """Return where each of the packed sequences begins, and where the last one ends, [B + 1] int32."""
        return torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)

    def slots(self, count: int, num_slots: int, *, skipped: bool = False) -> Tensor:
        """Draw `count` of the slots in random order; skipped: every third token gets -1."""
        drawn = torch.randperm(num_slots, device=self.device)[:count]
        return torch.where(torch.arange(count, device=self.device) % 3 == 1, -1, drawn) if skipped else drawn

    def sequences(self, queries: Sequence[int], contexts: Sequence[int], block: int) -> tuple[Values, int]:
        """Draw block tables, starts and lengths of sequences; return them and the number of blocks of the cache.

        queries, contexts: new tokens and keys of each sequence, whose blocks lie in random order in the cache.
        """
        counts = [-(-context // block) for context in contexts]
        blocks = sum(counts) + 3
        tables, free = torch.zeros(len(counts), max(counts, default=0) + 1, dtype=torch.int32), torch.randperm(blocks)
        for b, count in enumerate(counts):
            tables[b, :count], free = free[:count].int(), free[count:]
        lengths = torch.tensor(contexts, dtype=torch.int32)
        tensors = {"block_tables": tables.to(self.device), "context_lens": lengths.to(self.device)}
        return tensors | {"query_starts": self.offsets(queries)}, blocks


def with_tokens(case: Values) -> Values:
    """Return a case of sequences with the number of their tokens: `lengths` or `queries` of each, and idle ones."""
    counts = case.get("lengths", case.get("queries"))
    return case if counts is None else {"tokens": (sum(counts) + case.get("idle", 0),), **case}


class Maker:
    """Makes the arguments of an operator's cases. words: from words of a case to the dims that they stand for."""

    def __init__(self, spec: Spec, special: Special, words: Mapping[str, str]) -> None:
        self.spec, self._special = spec, special
        self._tensors = {tensor.name: tensor for tensor in spec.tensors}
        self._letters = {letter for x in spec.tensors for dim in x.dims for letter in dim.unknowns({})}
        words = {"tokens": "T" if "T" in self._letters else LEADING} | dict(words)
        self._words = {word: TensorSpec.parse(word, f"[{dims}] any") for word, dims in words.items()}
        if spec.tensors:
            self._words["shape"] = spec.tensors[0]
        self._renamed = {word: name for word, name in words.items() if name in spec.signature.parameters}
        taken = inspect.signature(special).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in taken)
        self._taken = {p.name for p in taken}
        self._is_backward = spec.operator.endswith("_backward")

    def __call__(self, draw: Draw, case: Values) -> Values:
        """Return all arguments of a case by name. Raises TypeError where it has an entry that nothing takes."""
        parameters = self.spec.signature.parameters
        taken = case if self._takes_all else {name: value for name, value in case.items() if name in self._taken}
        if unknown := case.keys() - taken.keys() - self._words.keys() - self._letters - parameters.keys():
            raise TypeError(f"{self.spec.operator}: nothing takes {', '.join(sorted(unknown))} of a case")
        known = case | {name: case[word] for word, name in self._renamed.items() if word in case}
        known |= self._special(draw, **taken)
        sizes = self._sizes(known)
        values: Values = {}
        for name, parameter in parameters.items():
            values[name] = known.get(name, None if parameter.default is parameter.empty else parameter.default)
            if name in self._tensors:
                values[name] = self._tensor(self._tensors[name], values[name], known | values, sizes, draw)
        return values

    def _sizes(self, known: Values) -> Sizes:
        """Return the sizes that follow from the known arguments, and from the letters and words of a case."""
        sizes: Sizes = {letter: known[letter] for letter in self._letters if type(known.get(letter)) is int}
        later: list[tuple[TensorSpec, Expression, Any]] = []
        for name, stated in {**self._tensors, **self._words}.items():
            value = known.get(name)
            if isinstance(value, (Tensor, tuple)):
                stated.fits(value.shape if isinstance(value, Tensor) else value, sizes, later)
            elif type(value) is int and name in self._words:
                stated.fits((value,), sizes, later)
        for _, dim, size in later:
            dim.fits(size, sizes)
        return sizes

    def _tensor(self, stated: TensorSpec, value: Any, known: Values, sizes: Sizes, draw: Draw) -> Tensor | None:
        """Return the argument of which the case says `value`."""
        if isinstance(value, Tensor):
            return value
        if stated.is_optional and value in (None, False):
            return None
        shape = stated.shape(sizes)
        if callable(value):
            drawn: Tensor = value(*shape)
            return drawn
        dtype = self._dtype(stated, known, draw)
        if isinstance(value, torch.dtype):
            dtype = torch.float64 if draw.dtype == torch.float64 else value
        if type(value) in (int, float):
            return torch.full(shape, value, dtype=draw.wide if dtype.is_floating_point else dtype, device=draw.device)
        if not dtype.is_floating_point:
            bounds = stated.bounds or Bounds(None, None)
            low = 0 if bounds.low is None else bounds.low.value(sizes)
            high = MOST if bounds.high is None else bounds.high.value(sizes)
            return torch.randint(low, max(low, high) + 1, shape, dtype=dtype, device=draw.device)
        draw = replace(draw, dtype=dtype)
        if self._is_backward and stated.name.startswith("d"):  # a gradient
            return draw.normal(*shape)
        return draw.weight(*shape) if stated.name.endswith("weight") else draw.scaled(*shape)

    def _dtype(self, stated: TensorSpec, known: Values, draw: Draw) -> torch.dtype:
        """Return the first dtype that a tensor may have."""
        kind = stated.kinds[0]
        if kind in self._tensors:
            other = known.get(kind)
            return other.dtype if isinstance(other, Tensor) else self._dtype(self._tensors[kind], known, draw)
        return {"float": draw.dtype, "fp32": draw.wide, "int": torch.int64}.get(kind) or NAMED[kind]
