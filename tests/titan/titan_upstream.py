"""Check whether the installed TorchTitan still has what our code uses of it.

`drift()` compares it with the names, signatures and source fingerprints in `titan_upstream_names.py`. A *point* is one
of these names, as text: `module:name` or `module:Class.method`.
"""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from titan_upstream_names import ATTRIBUTES, CONSTANTS, FIELDS, NAMES, SIGNATURES, SOURCES

WRITTEN_FOR = "0.2.2"  # the version of TorchTitan that our code is written for


def resolve(point: str) -> Any:
    """Return the object that a point names; raises ImportError or AttributeError when it does not exist."""
    module, _, path = point.partition(":")
    target = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    return target


def owner(point: str) -> Any:
    """Return the class that a point lies in; None for a point outside a class."""
    return resolve(point.rpartition(".")[0]) if "." in point.partition(":")[2] else None


def signature(function: Callable[..., Any]) -> str:
    """Return the parameters of a function as text, with `=` after those that have a default."""
    parts: list[str] = []
    is_keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            parts.append("*")
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
        is_keyword_only |= stars == "*"
        parts.append(f"{stars}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return f"({', '.join(parts)})"


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a hash of the source of a function, without its docstring, blank lines and comment lines."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.FunctionDef)
    lines = text.splitlines()
    if ast.get_docstring(body) is not None:
        first = body.body[0]
        del lines[first.lineno - 1 : first.end_lineno]
    code_lines = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(code_lines).encode()).hexdigest()[:12]


def _find_problem(point: str, compare: Callable[[Any], str | None]) -> str | None:
    """Return what has changed at a point, or None; `compare` returns what is different about the object."""
    try:
        target = resolve(point)
    except (ImportError, AttributeError) as error:
        return f"{point} does not exist: {error}"
    problem = compare(target)
    return None if problem is None else f"{point} {problem}"


def _signature_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(target: Any) -> str | None:
        actual = signature(target)
        return None if actual == expected else f"has the signature {actual}, expected {expected}"

    return compare


def _fields_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(target: Any) -> str | None:
        if not dataclasses.is_dataclass(target):
            return "is not a dataclass"
        missing = set(expected.split()) - {field.name for field in dataclasses.fields(target)}
        return f"has no field {', '.join(sorted(missing))}" if missing else None

    return compare


def set_on_self(cls: type) -> set[str]:
    """Return the attributes that methods of a class, and of its bases in the same package, assign to self."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == cls.__module__.split(".")[0]:
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return names


def _attributes_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(target: Any) -> str | None:
        missing = set(expected.split()) - set_on_self(target)
        return f"does not set {', '.join(sorted(missing))}" if missing else None

    return compare


def _constant_problem(expected: object) -> Callable[[Any], str | None]:
    return lambda value: None if value == expected else f"is {value!r}, expected {expected!r}"


def _source_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(target: Any) -> str | None:
        actual = fingerprint(target)
        return (
            None if actual == expected else f"has changed ({actual}, expected {expected}); compare our version with it"
        )

    return compare


def drift() -> list[str]:
    """Return what has changed in the installed TorchTitan; an empty list means that our code fits.

    Call it before `cpu.install()`, which changes TorchTitan.
    """
    checks: list[tuple[str, Callable[[Any], str | None]]] = []
    checks += [(point, _signature_problem(expected)) for point, expected in SIGNATURES.items()]
    checks += [(point, _fields_problem(expected)) for point, expected in FIELDS.items()]
    checks += [(point, _attributes_problem(expected)) for point, expected in ATTRIBUTES.items()]
    checks += [(point, _constant_problem(expected)) for point, expected in CONSTANTS.items()]
    checks += [(point, _source_problem(expected)) for point, expected in SOURCES.items()]
    checks += [(point, lambda target: None) for point in NAMES]
    return [problem for point, compare in checks if (problem := _find_problem(point, compare)) is not None]
