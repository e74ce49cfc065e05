"""cos/sin tables: their dtype, and the row of each token for one or several position axes."""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from whorl.contracts import interleaved_range_reason
from whorl.device import BACKENDS

from .._tracing import is_readable

Style = Literal["half", "pairs"]
OutStyle = Literal["half", "pairs", None]
Where = Literal["leading", "trailing"]
LAYOUTS = ("chunked", "interleaved", "hwt")  # of MRoPE sections, as merge_mrope explains them
INTEGERS = (torch.int32, torch.int64)

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
    """Look up the table rows of tokens with several positions: each pair of channels has the angle of its own axis.

    cos_sin: [P, R]; positions: [A, *tokens] int32 or int64, A = 3 rows t, h, w (time, height, width) or 4; sections: A
    counts of pairs that sum to R/2; returns rows [*tokens, R] for `rope`. Merge the axes once per step and share the
    rows between layers. `layout` assigns the R/2 pairs to axes. `chunked` (Qwen2-VL): first the pairs of t, then of h,
    then of w. `interleaved` (Qwen3-VL, as in transformers): pairs 1, 4, ... below 3h follow h, pairs 2, 5, ... below 3w
    follow w, the others t, where h and w are their sections; torch_npu's published formula bounds w by 3h instead.
    `hwt` (Ernie-4.5-VL), with sections (h, w, t): pairs of h and w alternate, then t. Raises ValueError when sections
    do not fit or, on the CPU, a position is outside the table.

        rows = ops.merge_mrope(table, positions, [24, 20, 20], "interleaved")
        q, k = ops.rope(q, k, rows)
    """
    if positions.dtype not in INTEGERS:
        raise ValueError(f"merge_mrope: positions is {positions.dtype}, expected torch.int32 or torch.int64")
    _check_sections(cos_sin, positions, sections, layout)
    check_places("merge_mrope", cos_sin, positions)
    rows = cos_sin[positions].unflatten(-1, (2, -1))  # [A, *tokens, cos and sin, R/2]
    merged = rows[0].clone()
    for axis, channels in _mrope_slices(sections, layout):
        merged[..., channels] = rows[axis][..., channels]
    return merged.flatten(-2)


def _check_sections(cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> None:
    """Raise ValueError unless the sections fit the positions, the table and the layout."""
    name, half = "merge_mrope", cos_sin.shape[-1] // 2
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


# ---- rows of tokens


def token_rows(cos_sin: Tensor, positions: Tensor | None) -> Tensor:
    """Return the table rows of all tokens, [*tokens, R]: cos_sin itself, or looked up in it by positions."""
    return cos_sin if positions is None else cos_sin[positions]


def check_places(name: str, cos_sin: Tensor, positions: Tensor) -> None:
    """Raise ValueError unless cos_sin is a table [P, R] that has a row for each of the positions.

    Their values are compared if `is_readable`.
    """
    if cos_sin.dim() != 2:
        raise ValueError(f"{name}: cos_sin is {list(cos_sin.shape)}, expected a table [P, R] to look positions up in")
    if positions.numel() and is_readable(positions):
        low, high = (int(v) for v in positions.aminmax())
        if low < 0 or high >= cos_sin.shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(f"{name}: position {wrong} is outside the table of {cos_sin.shape[0]} rows")
