"""Dtypes by name, for limits."""

from collections.abc import Sequence

FLOATS = ("float16", "bfloat16", "float32")


def dtype_limit(what: str, dtype: str, allowed: Sequence[str]) -> str | None:
    return None if dtype in allowed else f"{what} must be one of {', '.join(allowed)}, got {dtype}"
