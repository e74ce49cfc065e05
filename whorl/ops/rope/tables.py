"""cos/sin tables: their dtype, and the row of each token for one or several position axes."""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from whorl.device import BACKENDS

from .checks import check_places, check_sections

Style = Literal["half", "pairs"]
Where = Literal["leading", "trailing"]
Layout = Literal["chunked", "interleaved", "hwt"]

# The two dims to transpose so that the token dims come first; None where they already do.
_SWAPPED = {"thd": None, "bshd": None, "bhsd": (1, 2), "sbhd": (0, 1)}


def tokens_first(x: Tensor, order: str) -> Tensor:
    """Return a view of x with its token dims first, [T, H, D] or [B, S, H, D]. The function is its own inverse.

    order: the dims of x, one of "thd", "bshd", "bhsd", "sbhd"; raises ValueError for any other. Example:
    `tokens_first(q, "bhsd")` of q [B, H, S, D] is [B, S, H, D].
    """
    if order not in _SWAPPED:
        raise ValueError(f"tokens_first: order is {order!r}, expected one of {', '.join(_SWAPPED)}")
    swapped = _SWAPPED[order]
    return x if swapped is None else x.transpose(*swapped)


def table_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the table for q of `dtype` on a device: fp32, but on Ascend q's 16-bit dtype.

    npu_mrope looks positions up in a table of q's dtype. A table stored in that dtype is rounded once; the rows of any
    other table are gathered and rounded in every layer.
    """
    is_rounded = torch.device(device).type == BACKENDS["torch_npu"].home and dtype in (torch.bfloat16, torch.float16)
    return dtype if is_rounded else torch.float32


def _mrope_slices(sections: Sequence[int], layout: str) -> list[tuple[int, slice]]:
    """Return (axis, slice of the R/2 pairs that follow it) for axes 1, 2, ...; all other pairs follow axis 0.

    An axis is a row of `positions`: 0 t, 1 h, 2 w.
    """
    if layout == "chunked":
        ends = list(itertools.accumulate(sections))
        return [(axis, slice(ends[axis - 1], ends[axis])) for axis in range(1, len(sections))]
    if layout == "interleaved":
        _, h, w = sections
        return [(1, slice(1, 3 * h, 3)), (2, slice(2, 3 * w, 3))]
    h, w, _ = sections  # hwt
    return [(1, slice(0, h + w, 2)), (2, slice(1, h + w, 2))]


def mrope_axes(sections: Sequence[int], layout: str) -> list[int]:
    """Return for each of the R/2 pairs the axis that it follows: the row of `positions` (0 t, 1 h, 2 w)."""
    axes = [0] * sum(sections)
    for axis, channels in _mrope_slices(sections, layout):
        axes[channels] = [axis] * len(axes[channels])
    return axes


def merge_mrope(cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str = "chunked") -> Tensor:
    """Look up table rows with which `rope` computes `mrope`: each pair has the angle of its own axis.

    cos_sin: [P, R], positions: [A, *tokens]; sections and layout as in `mrope`; returns [*tokens, R]. Merge the axes
    once per step and share the rows between layers. Raises ValueError when sections do not fit or, on the CPU, a
    position is outside the table.

        rows = ops.merge_mrope(table, positions, [24, 20, 20], "interleaved")
        q, k = ops.rope(q, k, rows)
    """
    check_sections("merge_mrope", cos_sin, positions, sections, layout)
    check_places("merge_mrope", cos_sin, positions)
    return merged_rows(cos_sin, positions, sections, layout)


# ---- channel orders and table rows


def read_write_orders(style: str, pairs_out: str) -> tuple[str, str]:
    """Return the orders in which channels are read and written, each "half" or "pairs"."""
    return (style, pairs_out) if style == "pairs" else ("half", "half")


def token_rows(cos_sin: Tensor, positions: Tensor | None) -> Tensor:
    """Return the table rows of all tokens, [*tokens, R]: cos_sin itself, or looked up in it by positions."""
    return cos_sin if positions is None else cos_sin[positions]


def merged_rows(cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> Tensor:
    """Compute `merge_mrope` without checks. cos_sin: [P, R], positions: [A, *tokens]; returns [*tokens, R]."""
    rows = cos_sin[positions].unflatten(-1, (2, -1))  # [A, *tokens, cos and sin, R/2]
    merged = rows[0].clone()
    for axis, channels in _mrope_slices(sections, layout):
        merged[..., channels] = rows[axis][..., channels]
    return merged.flatten(-2)
