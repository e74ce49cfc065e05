"""The call of a vendor operator: every argument by its name, the schema's defaults filled in.

Torch hands on by place what was given by name, so a kernel cannot rely on how its caller wrote the call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl.contracts import CONTRACTS
from whorl.contracts.contract import REQUIRED

# As a schema's int holds a dtype.
DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def dtype_of(value: Any) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else DTYPES[value]


class Call:
    """`call.x` is argument x of one call of the operator `name`."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        bound = _signature(name).bind(*args, **kwargs)
        bound.apply_defaults()
        self._name, self._values, self._read = name, bound.arguments, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(f"{self._name} has no argument {name!r}, only {', '.join(self._values)}")
        self._read.add(name)
        return self._values[name]

    def refuse_unread(self) -> None:
        """What a formula does not look at must be the default, or the formula does not compute what was asked for."""
        defaults = {p.name: p.default for p in CONTRACTS[self._name].parameters}
        for name, value in self._values.items():
            is_default = value is None or (not isinstance(value, Tensor) and value == defaults[name])
            assert name in self._read or is_default, f"{self._name}: {name}={value!r} is not looked at"


@functools.cache
def _signature(name: str) -> inspect.Signature:
    kind = inspect.Parameter
    return inspect.Signature(
        kind(
            p.name,
            kind.KEYWORD_ONLY if p.keyword_only else kind.POSITIONAL_OR_KEYWORD,
            default=kind.empty if p.default is REQUIRED else p.default,
        )
        for p in CONTRACTS[name].parameters
    )


def by_schema(name: str) -> Callable[[Callable[[Call], Any]], Callable[..., Any]]:
    """A formula over a `Call`, as a function that is called as the operator is."""

    def decorate(formula: Callable[[Call], Any]) -> Callable[..., Any]:
        @functools.wraps(formula)
        def run(*args: Any, **kwargs: Any) -> Any:
            call = Call(name, *args, **kwargs)
            out = formula(call)
            call.refuse_unread()
            return out

        return run

    return decorate
