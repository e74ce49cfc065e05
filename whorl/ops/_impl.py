"""Implementations of an operator: passed as functions, or named and imported when their backend is first chosen."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]
Reason = Callable[..., str | None]  # returns None, or the reason not to choose the backend for these arguments


def no_reason(**_: Any) -> str | None:
    """Return None for any arguments: the default of both `accepts` and `slower`."""
    return None


@dataclass(frozen=True, slots=True)
class LazyFunction:
    """A function named as "module:function", imported when it is first needed.

    A module name without a dot is a module in the package of the operator's reference. A name that begins with a dot
    is relative to that package; any other is absolute.
    """

    operator: str
    names: Sequence[str]  # of the reference's parameters
    backend: str
    where: str  # "module:function"
    package: str  # of the reference

    def load(self) -> Function:
        """Import the function. Raises TypeError if the module has none of that name or its parameters do not fit."""
        module_name, _, name = self.where.partition(":")
        is_beside = self.package and "." not in module_name
        module = importlib.import_module(f".{module_name}" if is_beside else module_name, self.package)
        function: Function | None = getattr(module, name, None)
        if function is None:
            raise TypeError(f"{self.operator}/{self.backend} is {self.where!r}: {module.__name__} has no {name!r}")
        check_signature(f"{self.operator}/{self.backend}", function, self.names)
        return function


def check_where(operator: str, backend: str, where: object) -> None:
    """Raise TypeError unless `where` is "" or "module:function"."""
    if where == "" or (isinstance(where, str) and all(where.partition(":"))):
        return
    function = getattr(where, "__name__", "function")
    raise TypeError(
        f"{operator}: impl({backend!r}, {where!r}): expected 'module:function'; to add a function itself, write "
        f"{operator}.impl({backend!r})({function})"
    )


class Impl:
    """One backend's function, and the reasons not to choose it for some arguments.

    `accepts` gives the reason that the backend cannot take the arguments, `slower` the reason that another backend is
    known to be faster for them. takes_fp64: whether it computes with tensors in fp64.
    """

    def __init__(
        self,
        backend: str,
        function: Function | LazyFunction,
        accepts: Reason = no_reason,
        slower: Reason = no_reason,
        *,
        takes_fp64: bool = True,
    ) -> None:
        self.backend, self.slower, self.takes_fp64 = backend, slower, takes_fp64
        self.source, self._accepts = function, accepts

    def accepts(self, **arguments: Any) -> str | None:
        """Return None, or the reason that the backend cannot take these arguments."""
        if not self.takes_fp64 and any(getattr(a, "dtype", a) is torch.float64 for a in arguments.values()):
            return "computes in fp32, got torch.float64"
        return self._accepts(**arguments)

    @functools.cached_property
    def function(self) -> Function:
        """The implementation, imported on first use."""
        return self.source.load() if isinstance(self.source, LazyFunction) else self.source


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs a call, its function, and the reason why each backend tried before it does not run."""

    backend: str
    function: Function
    reasons: dict[str, str]


def check_signature(name: str, function: Function, expected: Sequence[str]) -> None:
    """Raise TypeError unless the function has the reference's parameter names, `expected`.

    Implementations are always called with every argument by name, so only the names must agree; defaults and types
    are declared once, in the reference. A backend may collect arguments that it ignores in `**_`, and may have further
    keyword-only parameters if they have defaults.
    """
    parameters = inspect.signature(function).parameters.values()
    has_var_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
    optional = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} - set(expected)
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in optional]
    if not set(names) <= set(expected) or not (has_var_keywords or names == list(expected)):
        raise TypeError(f"{name} takes {names}, the reference {list(expected)}")
