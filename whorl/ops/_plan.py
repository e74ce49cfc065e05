"""The plan for a kind of call, made once and then cached: which backend computes it, and what is saved for backward.

Two calls are of one kind when everything that checks and the choice of a backend may look at is equal, except the
values of tensors: the dtype, shape, strides, device, requires_grad and address modulo 16 bytes of each tensor, the
value of every other argument, and the requested backend. No tensor is kept alive.
"""

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._gradient import SavedState, Values
from ._impl import Function, Impl
from ._tracing import PLAIN

Key = tuple[Any, ...]
# Takes the requested backend and the operator's arguments; returns the key of the call's kind and the arguments by
# name, or None where a tensor is of a subclass of Tensor other than Parameter.
Describe = Callable[..., tuple[Key, Values] | None]
NOT_DESCRIBED = (TypeError, AttributeError, RuntimeError)  # what a Describe function raises for wrong arguments
MAX_KINDS = 1024  # kinds of calls remembered for one operator; one step of a model has a few
_TENSOR_KEY = "{0}.dtype, {0}.shape, {0}.stride(), {0}.device, {0}.requires_grad, {0}.data_ptr() & 15"


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one kind are computed."""

    requested: str  # the backend that was forced, "" where none was
    device: str
    function: Function | None  # None: the reference
    check: Callable[..., None] | None  # must run in every call, because it reads tensor values; None: once was enough
    state: SavedState | None  # for backward; None where no tensor requires a gradient


class Plans(dict[Key, Plan]):
    """Plans by kind. Beyond MAX_KINDS the oldest half is dropped, so that shapes that never recur are forgotten."""

    def remember(self, key: Key, plan: Plan) -> None:
        """Store the plan of a kind."""
        if len(self) >= MAX_KINDS:
            for old in list(self)[: MAX_KINDS // 2]:
                self.pop(old, None)  # another thread may have dropped it
        self[key] = plan


class Impls(dict[str, Impl]):
    """Implementations by backend, in the order in which they are tried. Any change to them clears the plans."""

    def __init__(self, impls: dict[str, Impl], plans: Plans) -> None:
        super().__init__(impls)
        self._plans = plans

    def __setitem__(self, backend: str, impl: Impl) -> None:
        super().__setitem__(backend, impl)
        self._plans.clear()

    def __delitem__(self, backend: str) -> None:
        super().__delitem__(backend)
        self._plans.clear()


def describer(name: str, signature: inspect.Signature) -> Describe:
    """Return the `Describe` function for an operator's signature.

    Its source is generated, so that Python itself binds the arguments: a loop over them would take microseconds.
    """
    parameters = list(signature.parameters.values())
    tensors = [p for p in parameters if _allows(p.annotation, Tensor)]
    plain = [f"({p.name} is None or {p.name}.__class__ in _plain)" for p in tensors]
    values = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
    text = (
        f"def describe(_requested, /, {_heading(parameters)}):\n"
        f"    if not ({' and '.join(plain) or True}):\n"
        "        return None\n"
        f"    return (_requested, {', '.join(map(_key_part, parameters))}), {{{values}}}\n"
    )
    names: Values = {f"_default_{p.name}": p.default for p in parameters} | {"_plain": PLAIN}
    exec(compile(text, f"<the arguments of {name}>", "exec"), names)
    describe: Describe = names["describe"]
    return describe


def _heading(parameters: Sequence[inspect.Parameter]) -> str:
    """Return the code of the parameter list; defaults are referred to as _default_<name>."""
    parts = [p.name if p.default is p.empty else f"{p.name}=_default_{p.name}" for p in parameters]
    is_keyword = [p.kind is p.KEYWORD_ONLY for p in parameters]
    if True in is_keyword:
        parts.insert(is_keyword.index(True), "*")
    return ", ".join(parts)


def _key_part(parameter: inspect.Parameter) -> str:
    """Return the code of an expression for what this argument contributes to the key."""
    name, annotation = parameter.name, parameter.annotation
    if annotation is Tensor:
        return _TENSOR_KEY.format(name)
    if _allows(annotation, Tensor):
        return f"None if {name} is None else ({_TENSOR_KEY.format(name)})"
    if _allows(annotation, Sequence) or _allows(annotation, list):
        return f"None if {name} is None else tuple({name})"
    return name


def _allows(annotation: Any, kind: Any) -> bool:
    """Return whether an annotation is `kind`, with or without type arguments, or a union that contains it."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_allows(a, kind) for a in typing.get_args(annotation))
    return kind in (annotation, typing.get_origin(annotation))
