"""Checks of tables, positions and sections that the rotary operators share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.contracts import interleaved_range_reason

from .._tracing import is_readable

LAYOUTS = ("chunked", "interleaved", "hwt")  # of MRoPE sections, as mrope explains them


def check_tensors(name: str, q: Tensor, k: Tensor | None, cos_sin: Tensor, prefix: str = "") -> None:
    """Raise ValueError unless q, k and the table fit together. prefix: "d" for gradients, which are dq and dk."""
    if q.dim() not in (3, 4):
        raise ValueError(f"{name}: {prefix}q is {list(q.shape)}, expected [T, HQ, D] or [B, S, HQ, D]")
    if not q.is_floating_point():
        raise ValueError(f"{name}: {prefix}q is {q.dtype}, expected a floating point dtype")
    if k is not None and (k.dtype != q.dtype or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]):
        raise ValueError(
            f"{name}: {prefix}k is {list(k.shape)} {k.dtype}, expected the tokens, head size and dtype of {prefix}q, "
            f"{list(q.shape)} {q.dtype}"
        )
    if cos_sin.dtype not in (torch.float32, torch.float64, q.dtype):
        raise ValueError(f"{name}: cos_sin is {cos_sin.dtype}, expected torch.float32, or q's dtype {q.dtype}")
    if cos_sin.requires_grad:
        raise ValueError(f"{name}: cos_sin requires a gradient, expected a constant table")
    rotary = cos_sin.shape[-1]
    if rotary % 2 or not 0 < rotary <= q.shape[-1]:
        raise ValueError(f"{name}: cos_sin has width {rotary}, expected an even rotary size of at most {q.shape[-1]}")


def check_positions(name: str, positions: Tensor, shape: Sequence[int], cos_sin: Tensor) -> None:
    """Raise ValueError unless positions are integers of this shape and cos_sin is a table [P, R] that has them all."""
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: positions is {positions.dtype}, expected torch.int32 or torch.int64")
    if list(positions.shape) != list(shape):
        raise ValueError(f"{name}: positions is {list(positions.shape)}, expected {list(shape)}")
    if cos_sin.dim() != 2:
        raise ValueError(f"{name}: cos_sin is {list(cos_sin.shape)}, expected a table [P, R] to look positions up in")
    check_places(name, cos_sin, positions)


def check_places(name: str, cos_sin: Tensor, positions: Tensor) -> None:
    """Raise ValueError for a position outside the table, if `is_readable`.

    Where positions are not read, kernels return NaN for such a token.
    """
    if positions.numel() and is_readable(positions):
        low, high = (int(v) for v in positions.aminmax())
        if low < 0 or high >= cos_sin.shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(f"{name}: position {wrong} is outside the table of {cos_sin.shape[0]} rows")


def check_axes(name: str, q: Tensor, cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> None:
    """Raise ValueError unless the sections fit and positions are [A, *tokens], one row for each section."""
    shape = [len(sections), *q.shape[:-2]]
    if positions.dim() == len(shape):
        check_sections(name, cos_sin, positions, sections, layout)
    check_positions(name, positions, shape, cos_sin)


def check_sections(name: str, cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> None:
    """Raise ValueError unless the sections fit the positions, the table and the layout."""
    half = cos_sin.shape[-1] // 2
    if layout not in LAYOUTS:
        raise ValueError(f"{name}: layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if len(sections) != positions.shape[0]:
        raise ValueError(
            f"{name}: positions has {positions.shape[0]} rows, sections {list(sections)} need {len(sections)}"
        )
    if len(sections) not in (3, 4) or min(sections) < 0:
        raise ValueError(f"{name}: sections is {list(sections)}, expected 3 or 4 counts of channels")
    if sum(sections) != half:
        raise ValueError(f"{name}: sections {list(sections)} sum to {sum(sections)}, the table has {half} channels")
    if layout != "chunked" and len(sections) != 3:
        raise ValueError(f"{name}: layout {layout!r} takes 3 sections, got {list(sections)}")
    if layout == "interleaved" and (why := interleaved_range_reason(sections)):
        raise ValueError(f"{name}: sections {list(sections)} cannot be interleaved: {why}")
    if layout == "hwt" and sections[0] != sections[1]:
        raise ValueError(f"{name}: sections {list(sections)}: h and w alternate in layout 'hwt' and must be equal")


def check_rows(name: str, q: Tensor, cos_sin: Tensor, positions: Tensor | None) -> None:
    """Raise ValueError unless every token has a table row: looked up by its position, or passed directly."""
    if positions is not None:
        check_positions(name, positions, q.shape[:-2], cos_sin)
    elif cos_sin.shape[:-1] != q.shape[:-2]:
        raise ValueError(
            f"{name}: cos_sin is {list(cos_sin.shape)}, expected one row for each token, {[*q.shape[:-2], 'R']}, "
            "or positions to look up"
        )
