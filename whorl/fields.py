"""Dataclass fields that are also command-line options. A field declares its help text, names and bounds.

`whorl.options` turns such dataclasses into command lines; this module needs neither it nor torch.
"""

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_KEY = "option"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """How a field appears on the command line.

    text: the help text. names: the flags; a switch may be "--so/--not-so". vllm: vLLM's flags for the same option,
    written in the same form, whether or not whorl has them too. panel: the group of --help that lists the option.
    least, most: inclusive bounds of a number. above: an exclusive lower bound. env: an environment variable that sets
    the default.
    """

    text: str
    names: tuple[str, ...]
    vllm: tuple[str, ...] = ()
    panel: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    metavar: str | None = None
    env: str | None = None


def option(default: Any, text: str, *names: str, declared: type[Option] = Option, **more: Any) -> Any:
    """Return a dataclass field with this default that is also an option.

    text: the help text; names: its flags, by default one made of the field's name; declared: `Option` or a subclass;
    more: its other fields.
    Raises TypeError for a mutable default. Example: `repeats: int = option(5, "Runs to take the median of.", least=1)`.
    """
    if isinstance(default, list | dict | set):
        kind = type(default).__name__
        raise TypeError(f"{text}: a default of type {kind} would be shared by all instances; use a tuple or None")
    return field(default=default, metadata={_KEY: declared(text=text, names=names, **more)})


def restated(declared: Option, default: Any, **changes: Any) -> Any:
    """Return a dataclass field that is declared like another one, with this default and these changes."""
    return field(default=default, metadata={_KEY: replace(declared, **changes)})


def options(kind: type) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a dataclass that are options, in declaration order."""
    for field_ in fields(kind):
        if _KEY in field_.metadata:
            yield field_, field_.metadata[_KEY]


def flag_names(field_: Field[Any]) -> tuple[str, ...]:
    """Return the flags of a field; a switch and its negation are one string, such as "--graphs/--no-graphs"."""
    declared: Option = field_.metadata[_KEY]
    return declared.names or (f"--{field_.name.replace('_', '-')}",)


def aliases(field_: Field[Any]) -> dict[str, str]:
    """Map each flag of vLLM that whorl does not have to whorl's flag for the same option."""
    ours = flag_names(field_)
    known = {name for spelled in ours for name in spelled.split("/")}
    pairs = [
        pair
        for vllm in field_.metadata[_KEY].vllm
        for pair in zip(vllm.split("/"), ours[0].split("/"), strict=True)
        if pair[0] not in known
    ]
    return dict(pairs)


def choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a Literal type, also of an optional one; () for other types."""
    if get_origin(hint) is Literal:
        return tuple(get_args(hint))
    return tuple(value for part in get_args(hint) for value in choices(part))


def check(settings: Any) -> None:
    """Raise ValueError for the first field of `settings` whose value is outside of what the field declares."""
    hints = get_type_hints(type(settings))
    for field_, declared in options(type(settings)):
        value, hint = getattr(settings, field_.name), hints[field_.name]
        is_optional = NoneType in get_args(hint)
        if value is None and is_optional:
            continue
        if (allowed := choices(hint)) and value not in allowed:
            raise ValueError(f"{field_.name} is {value!r}, expected {_listed(allowed, is_optional)}")
        if expected := out_of_bounds(value, hint, declared):
            raise ValueError(f"{field_.name} is {value!r}, expected {expected}")


def _listed(allowed: tuple[str, ...], is_optional: bool) -> str:
    if not is_optional:
        return f"one of {', '.join(allowed)}"
    *first, last = ["None", *map(repr, allowed)]
    return f"{', '.join(first)} or {last}"


def out_of_bounds(value: Any, hint: Any, declared: Option) -> str | None:
    """Return what was expected of a number that is out of bounds or of the wrong type, else None."""
    kinds = {kind for kind in (hint, *get_args(hint)) if kind in (int, float)}
    if not kinds:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral if kinds == {int} else Real):
        return "a whole number" if kinds == {int} else "a number"
    number: Any = value  # compared as it is: a float would round large integers
    if math.isnan(number):
        return "a number"
    if declared.least is not None and number < declared.least:
        return f"at least {declared.least:g}"
    if declared.above is not None and number <= declared.above:
        return f"more than {declared.above:g}"
    if declared.most is not None and number > declared.most:
        return f"at most {declared.most:g}"
    return None
