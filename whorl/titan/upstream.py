"""Whether the TorchTitan that is installed is still the one we are written for: `drift()` compares it with the names
and texts in `upstream_names.py`.
"""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from whorl.titan.upstream_names import ATTRIBUTES, CONSTANTS, FIELDS, NAMES, SIGNATURES, SOURCES

WRITTEN_FOR = "0.2.2"


def resolve(point: str) -> Any:
    """The object of `module:name.name`."""
    module, _, path = point.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def owner(point: str) -> Any:
    """Of a method, its class; None for what is in no class."""
    return resolve(point.rpartition(".")[0]) if "." in point.partition(":")[2] else None


def signature(function: Callable[..., Any]) -> str:
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
    """Of what a function does, by its text: not of its docstring, blank lines and lines that are comments."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.FunctionDef)
    lines = text.splitlines()
    if ast.get_docstring(body) is not None:
        first = body.body[0]
        del lines[first.lineno - 1 : first.end_lineno]
    kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]


def _look(point: str, compare: Callable[[Any], str | None]) -> str | None:
    try:
        found = resolve(point)
    except (ImportError, AttributeError) as error:
        return f"{point} is gone: {error}"
    problem = compare(found)
    return None if problem is None else f"{point} {problem}"


def _signature_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(found: Any) -> str | None:
        now = signature(found)
        return None if now == expected else f"takes {now}, expected {expected}"

    return compare


def _fields_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(found: Any) -> str | None:
        if not dataclasses.is_dataclass(found):
            return "is no dataclass any more"
        missing = set(expected.split()) - {field.name for field in dataclasses.fields(found)}
        return f"has no field {', '.join(sorted(missing))} any more" if missing else None

    return compare


def set_on_self(cls: type) -> set[str]:
    """Attributes that the methods of a class assign, those of its bases in TorchTitan too."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == cls.__module__.split(".")[0]:
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return found


def _attributes_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(found: Any) -> str | None:
        missing = set(expected.split()) - set_on_self(found)
        return f"does not set {', '.join(sorted(missing))} any more" if missing else None

    return compare


def _constant_problem(expected: object) -> Callable[[Any], str | None]:
    return lambda found: None if found == expected else f"is {found!r}, expected {expected!r}"


def _source_problem(expected: str) -> Callable[[Any], str | None]:
    def compare(found: Any) -> str | None:
        now = fingerprint(found)
        return None if now == expected else f"has another body ({now}, expected {expected}): compare ours with it"

    return compare


def drift() -> list[str]:
    """What has changed in the TorchTitan that is installed; empty where we fit. Not after `cpu.install()`."""
    looks: list[tuple[str, Callable[[Any], str | None]]] = []
    looks += [(point, _signature_problem(expected)) for point, expected in SIGNATURES.items()]
    looks += [(point, _fields_problem(expected)) for point, expected in FIELDS.items()]
    looks += [(point, _attributes_problem(expected)) for point, expected in ATTRIBUTES.items()]
    looks += [(point, _constant_problem(expected)) for point, expected in CONSTANTS.items()]
    looks += [(point, _source_problem(expected)) for point, expected in SOURCES.items()]
    looks += [(point, lambda found: None) for point in NAMES]
    return [problem for point, compare in looks if (problem := _look(point, compare)) is not None]
