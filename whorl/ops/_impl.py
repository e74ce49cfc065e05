"""Implementations of an operator by its backends: given as functions, or named and imported when first chosen."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]
Accepts = Callable[..., str | None]  # None, or the reason that these arguments cannot be taken


def takes_all(**_: Any) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Named:
    """A function by its place: "module:function".

    A module without a dot in its name lies beside the file of the operator's reference; one with dots is looked up as
    it is, or from there if it begins with one.
    """

    operator: str
    names: Sequence[str]  # of the reference's parameters
    backend: str
    where: str
    package: str

    def load(self) -> Function:
        module_name, _, name = self.where.partition(":")
        is_beside = self.package and "." not in module_name
        module = importlib.import_module(f".{module_name}" if is_beside else module_name, self.package)
        function: Function | None = getattr(module, name, None)
        if function is None:
            raise TypeError(f"{self.operator}/{self.backend} is {self.where!r}: {module.__name__} has no {name!r}")
        check_signature(f"{self.operator}/{self.backend}", function, self.names)
        return function


class Impl:
    """One backend's function, which arguments it accepts, and for which another backend's is known to be faster."""

    def __init__(
        self, backend: str, function: Function | Named, accepts: Accepts = takes_all, slower: Accepts = takes_all
    ) -> None:
        self.backend, self.accepts, self.slower = backend, accepts, slower
        self.given = function

    @functools.cached_property
    def function(self) -> Function:
        """Imported the first time that it is asked for."""
        return self.given.load() if isinstance(self.given, Named) else self.given


@dataclass(frozen=True, slots=True)
class Choice:
    backend: str
    function: Function
    reasons: dict[str, str]  # backends passed over


def check_signature(what: str, function: Function, expected: Sequence[str]) -> None:
    """TypeError unless it takes the reference's arguments.

    It is always called with every argument by name, so names are the contract; defaults and types stand once, in the
    reference. `**rest` takes those that a backend does not look at; a keyword of its own needs a default.
    """
    parameters = inspect.signature(function).parameters.values()
    has_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} - set(expected)
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in own]
    if not set(names) <= set(expected) or not (has_rest or names == list(expected)):
        raise TypeError(f"{what} takes {names}, the reference {list(expected)}")
