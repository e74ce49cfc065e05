"""The schema of a torch op, derived from the signature of its reference."""

import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from torch.library import infer_schema


def torch_schema(signature: inspect.Signature, mutates: Sequence[str]) -> str:
    """Return the torch schema of a signature, with the keyword `backend` added.

    infer_schema refuses `Literal` parameters and optional outputs: they become `str` and plain tensors.
    """
    parameters = [p.replace(annotation=_plain(p.annotation)) for p in signature.parameters.values()]
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default="", annotation=str)

    def prototype() -> None: ...

    returns = signature.return_annotation
    if typing.get_origin(returns) is tuple:
        returns = tuple.__class_getitem__(tuple(_required(a) for a in typing.get_args(returns)))
    prototype.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, backend], return_annotation=returns
    )
    return infer_schema(prototype, mutates_args=mutates)


def literals(annotation: Any) -> tuple[str | None, ...]:
    """Return the options of a `Literal[...]` annotation, among which may be None, or () for any other annotation."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _plain(annotation: Any) -> Any:
    options = literals(annotation)
    return annotation if not options else str | None if None in options else str


def _required(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation
