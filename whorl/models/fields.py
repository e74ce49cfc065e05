"""Fields of a config.json, each of the type it must have: a checkpoint is whatever somebody put into a folder."""

from collections.abc import Mapping
from typing import Any

MOST = 1 << 40  # of anything: far above what files hold


def count(values: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number, `least` or more; without a default the field must be there."""
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise ValueError(f"config.json: {name} missing; found {sorted(map(str, values))}")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST:
        raise ValueError(f"config.json: {name} is {value!r}, expected a whole number, {least} or more")
    return value


def number(values: Mapping[str, Any], name: str, default: float) -> float:
    """A number above 0."""
    value = default if values.get(name) is None else values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {name} is {value!r}, expected a number above 0")
    return float(value)


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = default if values.get(name) is None else values[name]
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}, expected true or false")
    return value
