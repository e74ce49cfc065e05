"""Limits that several operators share. Each function returns the broken limit in words, or None.

Dtypes are passed by name, because this package does not import torch.
"""

from collections.abc import Sequence
from math import prod

from .contract import Shape

FLOATS = ("float16", "bfloat16", "float32")
HALF = ("float16", "bfloat16")
INNER = 65536  # the last dims of the matrices of a matmul must be below it


def dtype_limit(argument: str, dtype: str, allowed: Sequence[str] = FLOATS) -> str | None:
    """Return None if `dtype` is one of `allowed`, otherwise the broken limit in words; argument: its name."""
    return None if dtype in allowed else f"{argument} must be one of {', '.join(allowed)}, got {dtype}"


def same_dtype_limit(argument: str, dtype: str | None, owner: str, expected: str) -> str | None:
    """Return a limit if an argument, which may be absent, has another dtype than `expected`, which is its owner's."""
    return None if dtype in (None, expected) else f"{argument} must have {owner} dtype {expected}, got {dtype}"


def dims_limit(arguments: str, dims: Sequence[int], *shapes: Shape) -> str | None:
    """Return a limit if a shape has another number of dims than `dims` lists."""
    if all(len(shape) in dims for shape in shapes):
        return None
    return f"{arguments} must be {' or '.join(f'{d}-D' for d in dims)}, got {_in_words(shapes)}"


def empty_limit(*shapes: Shape) -> str | None:
    """Return a limit if a shape has no elements."""
    return None if all(map(prod, shapes)) else f"empty tensors are not supported, got {_in_words(shapes)}"


def _in_words(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)
