"""What every function of whorl.ascend does before it computes.

It refuses gradients that torch_npu does not have, calls torch_npu itself for tensors on an NPU, and elsewhere enforces
the limits that the vendor documents. On an NPU torch_npu alone checks the arguments.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from types import NoneType, TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

import torch
from torch import Tensor

from whorl.contracts import CONTRACTS
from whorl.ops._torch_npu import dtype_name, installed

P = ParamSpec("P")
R = TypeVar("R")
Values = dict[str, Any]  # the arguments of a call by name, defaults included

_limits = "enforce"


class limits:
    """Enforce or ignore the documented device limits off the NPU, from now on or inside a `with` block.

    mode: "enforce" (the default: a call that breaks a limit raises ValueError) or "ignore". The setting holds for all
    threads. Arguments without a meaning, such as an odd rotary size, stay errors. Raises ValueError for another mode.

    Example: with limits("ignore"): npu_rotary_mul(x, cos, sin)
    """

    def __init__(self, mode: Literal["enforce", "ignore"]) -> None:
        global _limits
        if mode not in ("enforce", "ignore"):
            raise ValueError(f"limits: mode is {mode!r}, expected 'enforce' or 'ignore'")
        self._previous, _limits = _limits, mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _limits
        _limits = self._previous


class Misfit(ValueError):
    """Arguments that do not fit; `operator` puts the name of the operator before the message."""


def enforce_limit(limit: str | None) -> None:
    """Raise Misfit if a limit is broken and limits are enforced; limit: the broken limit in words, or None."""
    if limit is not None and _limits == "enforce":
        raise Misfit(f"{limit}. The device documents this limit; whorl.ascend.limits('ignore') lifts it")


def needs_gradient(*tensors: Tensor | Sequence[Tensor] | None) -> bool:
    """Return whether a gradient of one of the tensors, some of which may be absent or lists, is needed."""
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for x in tensors if x is not None for t in ((x,) if isinstance(x, Tensor) else x))


class operator:
    """Make a function the operator of its name: on an NPU torch_npu's, elsewhere the function itself, after checks.

    limit: a function of `whorl.contracts`. Its arguments are those of the call that have the same name; `<x>_shape` and
        `<x>_dtype` are those of argument x, `shape` and `dtype` those of the operator's main tensor.
    limit_arguments: the arguments of `limit` that the call has under another name, or functions of the call's.
    no_gradient: the tensors whose gradient torch_npu lacks, or a function that returns why it lacks one. The main
        tensor is the first of them, or the first argument.
    npu_only: the arguments that must have their defaults off the NPU.
    choices: by argument, the values that have a meaning off the NPU; a mapping says which meaning.
    """

    def __init__(
        self,
        limit: Callable[..., str | None] | None = None,
        *,
        no_gradient: str | Callable[[Values], str | None] = "",
        npu_only: str = "",
        choices: Mapping[str, Collection[Any]] | None = None,
        **limit_arguments: str | Callable[[Values], Any],
    ) -> None:
        self._limit = limit
        self._limit_arguments: dict[str, Any] = limit_arguments
        self._no_gradient = no_gradient if callable(no_gradient) else no_gradient.split()
        self._npu_only, self._choices = npu_only.split(), choices or {}

    def __call__(self, compute: Callable[P, R]) -> Callable[P, R]:
        self._compute: Callable[..., Any] = compute
        self._name = compute.__name__
        parameters = inspect.signature(compute).parameters.values()
        self._names = dict.fromkeys(p.name for p in parameters)
        self._positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        # None stands for the default of these.
        may_be_none = {p.name for p in parameters if NoneType in get_args(p.annotation)}
        self._optional = {n: d for n, d in self._defaults.items() if d is not None and n in may_be_none}
        tensors = [] if callable(self._no_gradient) else self._no_gradient
        self._main = [*tensors, *self._positional][0]
        readers = {n: self._reader(n) for n in (inspect.signature(self._limit).parameters if self._limit else ())}
        self._readers = {parameter: read for parameter, read in readers.items() if read is not None}

        @functools.wraps(compute)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = self._run(args, kwargs)
            return result

        return run

    def _run(self, args: tuple[Any, ...], kwargs: Values) -> Any:
        values = self._bind(args, kwargs)
        self._refuse_gradient(values)
        if _first(values[self._main]).device.type == "npu":
            return self._call_npu(values)
        try:
            self._check(values)
            return self._compute(**values)
        except Misfit as error:
            raise ValueError(f"{self._name}: {error}") from None

    def _bind(self, args: tuple[Any, ...], kwargs: Values) -> Values:
        passed = dict(zip(self._positional, args, strict=False)) | kwargs
        values = self._defaults | passed
        if len(passed) < len(args) + len(kwargs) or values.keys() != self._names.keys():
            self._compute(*args, **kwargs)  # raises Python's own TypeError
        return values

    def _refuse_gradient(self, values: Values) -> None:
        if callable(self._no_gradient):
            if (reason := self._no_gradient(values)) is not None:
                raise RuntimeError(f"{self._name}: {reason}")
        elif self._no_gradient and needs_gradient(*[values[name] for name in self._no_gradient]):
            lack = "drops it silently" if CONTRACTS[self._name].gradient == "silently lost" else "has none"
            raise RuntimeError(
                f"{self._name}: a gradient is needed and torch_npu {lack}; use torch.no_grad(), or whorl.ops"
            )

    def _call_npu(self, values: Values) -> Any:
        """Call the vendor's operator; an argument that the installed torch_npu lacks must have its default."""
        if CONTRACTS[self._name].library == "mindspeed":
            return getattr(importlib.import_module(f"mindspeed.ops.{self._name}"), self._name)(**values)
        function = getattr(importlib.import_module("torch_npu"), self._name)
        return function(**installed().call_arguments(self._name, **values))

    def _check(self, values: Values) -> None:
        for name, default in self._optional.items():
            if values[name] is None:
                values[name] = default
        unsupported = [n for n in self._npu_only if not _is_default(values[n], self._defaults[n])]
        if unsupported:
            words = [f"{n}={v!r}" if isinstance(v := values[n], int | str | float) else n for n in unsupported]
            raise Misfit(f"{', '.join(words)} is implemented on an NPU only; leave it out off the NPU")
        if self._limit is not None and _limits == "enforce":
            enforce_limit(self._limit(**{parameter: read(values) for parameter, read in self._readers.items()}))
        for name, allowed in self._choices.items():
            if values[name] not in allowed:
                raise Misfit(f"{name} is {values[name]!r}, expected {_in_words(allowed)}")

    def _reader(self, parameter: str) -> Callable[[Values], Any] | None:
        """Return how an argument of the limit is read from those of a call; None: its default holds."""
        source = self._limit_arguments.get(parameter, parameter)
        if callable(source):
            return cast(Callable[[Values], Any], source)
        if source in self._names:
            return itemgetter(source)
        prefix, _, kind = source.rpartition("_")
        argument = self._limit_arguments.get(prefix, prefix) or self._main
        if argument not in self._names or kind not in ("shape", "dtype"):
            return None
        read = _shape if kind == "shape" else _dtype
        return lambda values: read(values[argument])


def _first(x: Tensor | Sequence[Tensor]) -> Tensor:
    return x if isinstance(x, Tensor) else x[0]


def _shape(x: Tensor | None) -> torch.Size | None:
    return None if x is None else x.shape


def _dtype(x: Tensor | Sequence[Tensor] | None) -> str | None:
    return None if x is None else dtype_name(_first(x))


def _is_default(value: Any, default: Any) -> bool:
    return value is None or (not isinstance(value, Tensor | list | tuple) and value == default)


def _in_words(values: Collection[Any]) -> str:
    meanings = values if isinstance(values, Mapping) else {}
    words = [f"{value!r} ({meanings[value]})" if value in meanings else repr(value) for value in values]
    return f"{', '.join(words[:-1])} or {words[-1]}"
