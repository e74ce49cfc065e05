"""Views of tensors as rows, for kernels that work along the last dim, and integer arithmetic for launchers."""

from collections.abc import Sequence

import torch
from torch import Tensor

Strides = tuple[int, ...]  # of a tensor's dims, in elements


def unit_stride(x: Tensor) -> Tensor:
    """Return x with unit stride along the last dim, copied only where needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat_rows(x: Tensor) -> Tensor:
    """Return x as [T, C] with unit stride along C: a view where the strides allow one, else a copy."""
    x = unit_stride(x)
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., C] as three dims with unit stride along C; every [i, j] of the result is one row of x.

    It is a view where the strides allow one, as for the q heads of a packed qkv, and a copy otherwise.
    """
    x = unit_stride(x)
    if x.dim() <= 2:
        return x.reshape(1, -1, x.shape[-1])
    if x.dim() == 3:
        return x
    return x.flatten(0, -3) if _merges(x) else x.reshape(1, -1, x.shape[-1])


def row_view(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return x [..., C] with two or three dims and unit stride along C, for `row_strides`: x itself wherever possible.

    like: a tensor that this function returned for another tensor of x's shape; the result has its shape.
    """
    x = unit_stride(x)
    if like is not None:
        return x if x.shape == like.shape else x.reshape(like.shape)
    return x if 2 <= x.dim() <= 3 else as_rows(x)


def row_strides(shape: Sequence[int], strides: Strides) -> tuple[int, int, int, int]:
    """Return A, B and the strides of both, for a `row_view` of this shape and these strides read as [A, B, C]."""
    return (1, shape[0], 0, strides[0]) if len(shape) == 2 else (shape[0], shape[1], strides[0], strides[1])


def _merges(x: Tensor) -> bool:
    """Return whether all dims but the last two can be merged into one dim without a copy."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 3))


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def empty_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor of x's shape, dtype and device; without keywords torch takes 1 us instead of 3."""
    return torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n. triton.next_power_of_2 would cost microseconds."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
