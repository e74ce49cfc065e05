"""What is decided once for a kind of call and then remembered: who computes it, and what its gradient keeps.

A kind is everything that checks and choices may look at, but for the values of tensors: of each tensor the dtype,
shape, strides, device, whether it requires a gradient and its address modulo 16 bytes; of all else the value; the
backend that was asked for. Tensors themselves are not kept.
"""

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._gradient import Kept, Values
from ._impl import Function, Impl
from ._tracing import PLAIN

Key = tuple[Any, ...]
# The kind of a call and its arguments by name, or None where a tensor is of a subclass. It takes the backend that was
# asked for, then what the operator takes.
Describe = Callable[..., tuple[Key, Values] | None]
NOT_DESCRIBED = (TypeError, AttributeError, RuntimeError)  # what wrong arguments raise in it
MOST = 1024  # kinds of an operator's calls; one step of a model has a few
_OF_TENSOR = "{0}.dtype, {0}.shape, {0}.stride(), {0}.device, {0}.requires_grad, {0}.data_ptr() & 15"


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one kind are computed."""

    asked: str  # the backend that was asked for, "" where none was
    device: str
    function: Function | None  # None: the reference
    check: Callable[..., None] | None  # asked in every call; None where the kind alone decides
    kept: Kept | None  # for backward; None where no tensor requires a gradient


class Plans(dict[Key, Plan]):
    """Plans by kind. The oldest half goes when there are too many, so sizes that never come again cost little."""

    def remember(self, key: Key, plan: Plan) -> None:
        if len(self) >= MOST:
            for old in list(self)[: MOST // 2]:
                self.pop(old, None)  # another thread may have
        self[key] = plan


class Impls(dict[str, Impl]):
    """Implementations by backend, the first to be asked first. Whoever changes them makes the plans void."""

    def __init__(self, impls: dict[str, Impl], plans: Plans) -> None:
        super().__init__(impls)
        self._plans = plans

    def __setitem__(self, backend: str, impl: Impl) -> None:
        super().__setitem__(backend, impl)
        self._plans.clear()

    def __delitem__(self, backend: str) -> None:
        super().__delitem__(backend)
        self._plans.clear()


def describer(reference: Callable[..., Any]) -> Describe:
    """A function made for this signature: Python binds the arguments, and no loop goes over them."""
    parameters = list(inspect.signature(reference).parameters.values())
    tensors = [p for p in parameters if _holds(p.annotation, Tensor)]
    plain = [f"({p.name} is None or {p.name}.__class__ in _plain)" for p in tensors]
    values = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
    text = (
        f"def describe(_asked, /, {_heading(parameters)}):\n"
        f"    if not ({' and '.join(plain) or True}):\n"
        "        return None\n"
        f"    return (_asked, {', '.join(map(_part, parameters))}), {{{values}}}\n"
    )
    names: Values = {f"_default_{p.name}": p.default for p in parameters} | {"_plain": PLAIN}
    exec(compile(text, f"<the arguments of {reference.__name__}>", "exec"), names)
    describe: Describe = names["describe"]
    return describe


def _heading(parameters: Sequence[inspect.Parameter]) -> str:
    parts = [p.name if p.default is p.empty else f"{p.name}=_default_{p.name}" for p in parameters]
    is_keyword = [p.kind is p.KEYWORD_ONLY for p in parameters]
    if True in is_keyword:
        parts.insert(is_keyword.index(True), "*")
    return ", ".join(parts)


def _part(parameter: inspect.Parameter) -> str:
    """Of the kind, what this argument brings."""
    name, annotation = parameter.name, parameter.annotation
    if annotation is Tensor:
        return _OF_TENSOR.format(name)
    if _holds(annotation, Tensor):
        return f"None if {name} is None else ({_OF_TENSOR.format(name)})"
    if _holds(annotation, Sequence) or _holds(annotation, list):
        return f"None if {name} is None else tuple({name})"
    return name


def _holds(annotation: Any, wanted: Any) -> bool:
    """Whether an annotation is `wanted`, of something or not, or allows it beside others."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_holds(a, wanted) for a in typing.get_args(annotation))
    return wanted in (annotation, typing.get_origin(annotation))
