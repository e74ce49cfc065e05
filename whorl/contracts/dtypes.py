"""Limits of dtypes, which are passed by name because this package does not import torch."""

from collections.abc import Sequence

FLOATS = ("float16", "bfloat16", "float32")


def dtype_limit(argument: str, dtype: str, allowed: Sequence[str]) -> str | None:
    """Return None if `dtype` is one of `allowed`, otherwise the broken limit in words; argument: its name."""
    return None if dtype in allowed else f"{argument} must be one of {', '.join(allowed)}, got {dtype}"
