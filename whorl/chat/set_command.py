"""`/set NAME VALUE`: changes the sampling parameters of the next answers."""

from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any, get_args

from whorl.engine.sampling_params import PARAMETERS, Parameter, SamplingParams


def _reader(hint: Any) -> Callable[[str], Any]:
    """Return the function that parses a value of this type."""
    kind = int if int in (hint, *get_args(hint)) else float
    is_optional = NoneType in get_args(hint)
    return lambda text: None if is_optional and text == "none" else kind(text)


def _expected(hint: Any, declared: Parameter) -> str:
    """Return what errors say was expected."""
    kind = "a whole number" if int in (hint, *get_args(hint)) else "a number"
    return f"{kind}{', or none' if NoneType in get_args(hint) else ''}: {declared.text}"


_LEFT_OUT = ("n", "logprobs", "prompt_logprobs")  # of a chat, which shows one answer
# For each parameter: how its value is parsed, and what errors say was expected.
_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    name: (_reader(hint), _expected(hint, declared))
    for name, (hint, declared) in PARAMETERS.items()
    if name not in _LEFT_OUT
}
_KINDS["stop"] = (lambda text: (text,) if text != "none" else (), "a text that ends an answer, or none")


SAMPLED = tuple(_KINDS)
NAMES = (*SAMPLED, "when_full", "thoughts", "format")


def change(params: SamplingParams, argument: str, *, command: str = "/set") -> SamplingParams:
    """Return the parameters with one of them changed; ValueError for an unknown name or an invalid value.

    argument: what follows the command, such as "temperature 0.7".
    """
    name, _, value = argument.partition(" ")
    name = name.lstrip("-").replace("-", "_")
    if name not in _KINDS:
        known = NAMES if command == "/set" else SAMPLED
        raise ValueError(f"{command} {name}: is not known. Has: {', '.join(known)}")
    kind, expected = _KINDS[name]
    try:
        parsed = kind(value.strip())
    except ValueError:
        raise ValueError(f"{command} {name} {value}: expected {expected}") from None
    try:
        return replace(params, **{name: parsed})
    except ValueError as error:
        raise ValueError(f"{command} {name}: {str(error).removeprefix('SamplingParams: ')}") from None


def describe(params: SamplingParams) -> list[str]:
    """Return a line for each parameter that `/set` can change."""
    return [f"{name:18} {_shown(getattr(params, name))}" for name in _KINDS]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)
