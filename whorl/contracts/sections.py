"""MRoPE sections: which channel belongs to which axis, and which sections the vendor documents."""

from typing import Final, Literal

from .contract import Shape

# The only sections that npu_mrope documents.
FUSED_MROPE_SECTIONS: Final = ((16, 24, 24), (24, 20, 20), (8, 12, 12), (16, 16, 16, 16))


def interleaved_axes(sections: Shape, formula: Literal["transformers", "vendor"] = "transformers") -> tuple[int, ...]:
    """Return the axis (0 t, 1 h, 2 w) of each of the R/2 channels when sections (t, h, w) interleave with stride 3.

    h has the channels 1::3 below 3*h, and w the channels 2::3 below an end that differs: 3*w in transformers, 3*h in
    the vendor's published formula. All other channels belong to t.
    """
    _, h, w = sections
    ends = {1: 3 * h, 2: 3 * w if formula == "transformers" else 3 * h}
    return tuple(c % 3 if c % 3 and c < ends[c % 3] else 0 for c in range(sum(sections)))


def interleaved_formulas_differ(sections: Shape) -> bool:
    """Return whether npu_mrope's cache_mode='interleave' gives some channel another axis than transformers does."""
    return interleaved_axes(sections, "transformers") != interleaved_axes(sections, "vendor")


def vendor_sections(sections: Shape) -> tuple[int, int, int]:
    """Return the (t, h, w) sections for which transformers' rule gives the axes of the vendor's formula."""
    axes = interleaved_axes(sections, "vendor")
    return axes.count(0), axes.count(1), axes.count(2)


def interleaved_range_reason(sections: Shape) -> str | None:
    """Return why (t, h, w) sections cannot interleave with stride 3 (the last h or w channel is missing), or None."""
    if len(sections) != 3:
        return f"interleaving needs 3 sections (t, h, w), got {len(sections)}"
    half = sum(sections)
    for axis, size, last in (("h", sections[1], 3 * sections[1] - 2), ("w", sections[2], 3 * sections[2] - 1)):
        if size > 0 and last >= half:
            return f"{axis}={size} needs channel {last}, there are {half}"
    return None
