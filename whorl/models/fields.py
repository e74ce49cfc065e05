"""Reads fields of config.json and checks their types: a checkpoint may come from anywhere."""

from collections.abc import Mapping
from typing import Any

# The key under which `backend` of LoadOptions is handed on with the values of a config.json.
BACKEND = "whorl_backend"
MOST = 1 << 40  # limit of any count: far above real values


def count(values: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """Return a field that must be a whole number of at least `least`; without a default it must be present."""
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise ValueError(f"config.json: {name} is missing; found {sorted(map(str, values))}")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST:
        raise ValueError(f"config.json: {name} is {value!r}, expected a whole number, {least} or more")
    return value


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that must be an object with names and values; an empty one if it is missing."""
    value = values.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {name} is {value!r}, expected an object with names and values")
    return value


def number(values: Mapping[str, Any], name: str, default: float) -> float:
    """Return a field that must be a number above 0."""
    value = default if values.get(name) is None else values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {name} is {value!r}, expected a number above 0")
    return float(value)


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that must be true or false."""
    value = default if values.get(name) is None else values[name]
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}, expected true or false")
    return value


def value_like(values: Mapping[str, Any], name: str, default: float) -> Any:
    """Return a field by the type of its default: a flag, a whole number of at least 1, or a number above 0."""
    read: Any = flag if isinstance(default, bool) else count if isinstance(default, int) else number
    return read(values, name, default)
