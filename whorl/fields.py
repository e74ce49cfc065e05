"""Fields of a dataclass that are also options of commands. What --help says of one stands where it is declared.

`whorl.options` makes command lines of such dataclasses; nothing here needs it, or torch.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_KEY = "option"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """text: what --help says. names: of the option; a switch's may be "--so/--not-so". vllm: vLLM's names of the same,
    written alike, whether or not they are ours, too.

    least, most: bounds of a number. above: a bound that a number must be above.
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


def option(default: Any, text: str, *names: str, **more: Any) -> Any:
    """A field with this default. names: default: one made of the field's name. more: fields of `Option`."""
    made = Option(text=text, names=names, **more)
    if isinstance(default, list | dict | set):
        raise TypeError(f"{text}: a default of type {type(default).__name__} would be shared; take a tuple or None")
    return field(default=default, metadata={_KEY: made})


def options(kind: type) -> Iterator[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, in their order."""
    for each in fields(kind):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def names_of(each: Field[Any]) -> tuple[str, ...]:
    """How a command line spells it; a switch and its opposite are one string."""
    made: Option = each.metadata[_KEY]
    return made.names or (f"--{each.name.replace('_', '-')}",)


def aliases(each: Field[Any]) -> dict[str, str]:
    """vLLM's names that are not ours, and the one of ours that each stands for."""
    ours = names_of(each)
    known = {name for spelled in ours for name in spelled.split("/")}
    pairs = [
        pair
        for vllm in each.metadata[_KEY].vllm
        for pair in zip(vllm.split("/"), ours[0].split("/"), strict=True)
        if pair[0] not in known
    ]
    return dict(pairs)


def choices(hint: Any) -> tuple[str, ...]:
    """Of a Literal, or of an optional one; () for other types."""
    if get_origin(hint) is Literal:
        return tuple(get_args(hint))
    return tuple(value for part in get_args(hint) for value in choices(part))


def check(settings: Any) -> None:
    """Refuse with ValueError a value that is outside of what its field declares."""
    hints = get_type_hints(type(settings))
    for each, made in options(type(settings)):
        value, hint = getattr(settings, each.name), hints[each.name]
        is_optional = NoneType in get_args(hint)
        if value is None and is_optional:
            continue
        if (allowed := choices(hint)) and value not in allowed:
            raise ValueError(f"{each.name} is {value!r}, expected {_listed(allowed, is_optional)}")
        if wrong := _out_of_bounds(value, hint, made):
            raise ValueError(f"{each.name} is {value!r}, expected {wrong}")


def _listed(allowed: tuple[str, ...], is_optional: bool) -> str:
    if not is_optional:
        return f"one of {', '.join(allowed)}"
    *first, last = ["None", *map(repr, allowed)]
    return f"{', '.join(first)} or {last}"


def _out_of_bounds(value: Any, hint: Any, made: Option) -> str | None:
    """What was expected of a number; None where this is it, or no number."""
    kinds = {kind for kind in (hint, *get_args(hint)) if kind in (int, float)}
    if not kinds:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral if kinds == {int} else Real):
        return "a whole number" if kinds == {int} else "a number"
    number = float(value)
    if made.least is not None and number < made.least:
        return f"at least {made.least:g}"
    if made.above is not None and number <= made.above:
        return f"more than {made.above:g}"
    if made.most is not None and number > made.most:
        return f"at most {made.most:g}"
    return None
