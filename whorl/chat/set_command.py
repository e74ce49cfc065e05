"""`/set NAME VALUE`: changes the sampling parameters of the next answers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whorl.engine.sequence import SamplingParams


def _optional(number: str) -> int | None:
    return None if number == "none" else int(number)


# For each parameter: how its value is parsed, and what errors say was expected.
_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number; 0 is greedy"),
    "top_k": (int, "a whole number; 0: all"),
    "top_p": (float, "a number up to 1; 1: all"),
    "min_p": (float, "a number up to 1; 0: none"),
    "repetition_penalty": (float, "a number; 1: none"),
    "presence_penalty": (float, "a number; 0: none"),
    "frequency_penalty": (float, "a number; 0: none"),
    "max_tokens": (_optional, "a whole number, or none: as many as fit"),
    "seed": (_optional, "a whole number, or none: a new one each time"),
    "stop": (lambda text: (text,) if text != "none" else (), "a text that ends an answer, or none"),
}


def change(params: SamplingParams, argument: str) -> SamplingParams:
    """Return the parameters with one of them changed; ValueError for an unknown name or an invalid value.

    argument: what follows `/set`, such as "temperature 0.7".
    """
    name, _, value = argument.partition(" ")
    name = name.lstrip("-").replace("-", "_")
    if name not in _KINDS:
        raise ValueError(f"/set {name}: is not known. Has: {', '.join(_KINDS)}, when_full")
    kind, expected = _KINDS[name]
    try:
        parsed = kind(value.strip())
    except ValueError:
        raise ValueError(f"/set {name} {value}: expected {expected}") from None
    try:
        return replace(params, **{name: parsed})
    except ValueError as error:
        raise ValueError(f"/set {name}: {str(error).removeprefix('SamplingParams: ')}") from None


def describe(params: SamplingParams) -> list[str]:
    """Return a line for each parameter that `/set` can change."""
    return [f"{name:18} {_shown(getattr(params, name))}" for name in _KINDS]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)
