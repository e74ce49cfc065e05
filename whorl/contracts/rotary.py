"""Limits of the rotary operators, and MRoPE's sections: which channel belongs to which axis.

The document that a docstring names by its date is the vendor's page of the operator.
"""

from typing import Final, Literal

from .contract import Shape
from .shared import HALF, dtype_limit, empty_limit, same_dtype_limit

# The only sections that npu_mrope documents.
FUSED_MROPE_SECTIONS: Final = ((16, 24, 24), (24, 20, 20), (8, 12, 12), (16, 16, 16, 16))
_FOUR_AXES = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "SBND": (1, 2, 0)}  # the dims of B, N and S
_AXES = _FOUR_AXES | {"TND": (0, 2, 1)}  # TND gets a leading B of 1 first


def rotary_mul_limit(
    *,
    shape: Shape,
    cos_shape: Shape,
    dtype: str,
    rotary_mode: str = "half",
    layout: str | None = None,
    table_needs_grad: bool = False,
) -> str | None:
    """Return the limit of npu_rotary_mul that a call breaks, or None.

    The operator has no layout argument. Where `layout` is None, 4-D tensors are within the limits if they are within
    them in one of the orders BNSD, BSND and SBND; 3-D tensors count as TND, with B = 1. Document of 2026-07-23, which
    has TND.
    """
    if (reason := dtype_limit("input", dtype)) is not None:
        return reason
    if rotary_mode not in ("half", "interleave"):
        return f"rotary_mode must be 'half' or 'interleave', got {rotary_mode!r}"
    if len(shape) not in (3, 4) or len(cos_shape) != len(shape):
        return f"input, cos and sin must be 3-D or 4-D, got {tuple(shape)} and {tuple(cos_shape)}"
    if shape[-1] % 2 or shape[-1] >= 896:
        return f"head size must be even and below 896, got {shape[-1]}"
    if cos_shape[-1] != shape[-1]:
        return f"cos and sin must have the full head size {shape[-1]}, got {cos_shape[-1]}"
    if layout is not None and layout not in _AXES:
        return f"layout must be one of {', '.join(_AXES)}, got {layout}"
    if len(shape) == 3 and layout not in (None, "TND"):
        return f"{layout} must be 4-D, got {tuple(shape)}"
    if len(shape) == 3:  # B = 1 and S = T
        shape, cos_shape, layout = (1, *shape), (1, *cos_shape), "TND"
    elif layout == "TND":
        return f"TND must be 3-D, got {tuple(shape)}"
    reasons = [
        _rotary_mul_layout_limit(shape, cos_shape, rotary_mode, name, table_needs_grad)
        for name in ([layout] if layout else _FOUR_AXES)
    ]
    return None if None in reasons else "; ".join(str(reason) for reason in reasons)


def _rotary_mul_layout_limit(
    shape: Shape, cos_shape: Shape, rotary_mode: str, layout: str, table_needs_grad: bool
) -> str | None:
    b, n, s = _AXES[layout]
    batch, heads = shape[b], shape[n]
    if cos_shape[s] != shape[s]:
        return f"{layout}: cos has {cos_shape[s]} positions, input {shape[s]}"
    if table_needs_grad and batch * heads > 1024:
        return f"{layout}: a gradient of cos and sin needs B*N <= 1024, got {batch * heads}"
    if rotary_mode == "interleave":
        if batch * heads >= 1000:
            return f"{layout}: interleave needs B*N < 1000, got {batch * heads}"
        if (cos_shape[b], cos_shape[n]) != (1, 1):
            return f"{layout}: interleave needs one cos row per position (B = N = 1), got {tuple(cos_shape)}"
        return None
    if batch >= 1000 or heads >= 1000:
        return f"{layout}: B and N must be below 1000, got B={batch}, N={heads}"
    if (cos_shape[b], cos_shape[n]) not in ((1, 1), (batch, 1), (batch, heads)):
        return f"{layout}: cos {tuple(cos_shape)} does not broadcast as 11SD, B1SD or BNSD to {tuple(shape)}"
    return None


def rotary_position_embedding_limit(
    *, shape: Shape, cos_shape: Shape, dtype: str, mode: int = 0, table_needs_grad: bool = False
) -> str | None:
    """Return the limit of MindSpeed's npu_rotary_position_embedding that a call breaks, or None.

    The limits are those of npu_rotary_mul (document of 2026-07-23).
    """
    if mode not in (0, 1):
        return f"mode must be 0 (half) or 1 (interleave), got {mode}"
    return rotary_mul_limit(
        shape=shape,
        cos_shape=cos_shape,
        dtype=dtype,
        rotary_mode=("half", "interleave")[mode],
        table_needs_grad=table_needs_grad,
    )


def mrope_limit(
    *,
    query_shape: Shape,
    key_shape: Shape,
    positions_shape: Shape,
    rotary_dim: int,
    head_size: int,
    dtype: str,
    table_dtype: str,
    sections: Shape | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> str | None:
    """Return the limit of npu_mrope that a call breaks, or None.

    sections: None or all zeros mean plain RoPE. Document of 2026-08-05.
    """
    reason = dtype_limit("query", dtype) or same_dtype_limit("cos_sin_cache", table_dtype, "query's", dtype)
    if reason is not None:
        return reason
    if len(query_shape) != 2 or len(key_shape) != 2:
        return f"query and key must be 2-D [T, heads*head_size], got {tuple(query_shape)} and {tuple(key_shape)}"
    unit = 16 if dtype == "float32" else 32
    if head_size % unit or rotary_dim % unit:
        return f"head_size and rotary size must be multiples of {unit} in {dtype}, got {head_size} and {rotary_dim}"
    if rotary_dim > head_size:
        return f"rotary size {rotary_dim} is larger than head_size {head_size}"
    if query_shape[1] % head_size or key_shape[1] % head_size:
        return f"query and key widths {query_shape[1]} and {key_shape[1]} are not multiples of head_size {head_size}"
    if rotary_mode not in ("half", "interleave"):
        return f"rotary_mode must be 'half' or 'interleave', got {rotary_mode!r}"
    if cache_mode not in ("default", "interleave"):
        return f"cache_mode must be 'default' or 'interleave', got {cache_mode!r}"
    tokens = query_shape[0]
    if key_shape[0] != tokens or positions_shape[-1] != tokens:
        return f"query, key and positions have {tokens}, {key_shape[0]} and {positions_shape[-1]} tokens"
    if sections is None or not any(sections):
        if len(positions_shape) != 1 or cache_mode != "default":
            return (
                f"plain RoPE needs positions [T] and cache_mode 'default', got {tuple(positions_shape)}, {cache_mode!r}"
            )
        return None
    return _mrope_section_limit(sections, positions_shape, rotary_dim, cache_mode)


def _mrope_section_limit(sections: Shape, positions_shape: Shape, rotary_dim: int, cache_mode: str) -> str | None:
    if sum(sections) * 2 != rotary_dim:
        return f"sections {list(sections)} sum to {sum(sections)}, half the rotary size is {rotary_dim // 2}"
    if len(positions_shape) != 2 or positions_shape[0] != len(sections):
        return f"positions must be [{len(sections)}, T] for sections {list(sections)}, got {tuple(positions_shape)}"
    if tuple(sections) not in FUSED_MROPE_SECTIONS:
        documented = ", ".join(str(list(s)) for s in FUSED_MROPE_SECTIONS)
        return f"sections {list(sections)} are not documented; npu_mrope documents {documented}"
    if len(sections) == 4 and cache_mode != "default":
        return f"four sections need cache_mode 'default', got {cache_mode!r}"
    return None


def interleave_rope_limit(
    *, shape: Shape, cos_shape: Shape, dtype: str, table_dtype: str, contiguous: bool = True
) -> str | None:
    """Return the limit of npu_interleave_rope that a call breaks, or None. Document of 2026-04-29."""
    reason = dtype_limit("x", dtype, HALF) or same_dtype_limit("cos and sin", table_dtype, "x's", dtype)
    if reason is not None:
        return reason
    if len(shape) != 4 or shape[-1] != 64:
        return f"x must be [B, N, S, 64], got {tuple(shape)}"
    if tuple(cos_shape) not in ((shape[0], 1, shape[2], 64), (shape[0], 1, 1, 64)):
        return f"cos and sin must be [{shape[0]}, 1, {shape[2]} or 1, 64], got {tuple(cos_shape)}"
    return None if contiguous else "x, cos and sin must be contiguous"


def apply_rotary_pos_emb_limit(
    *,
    query_shape: Shape,
    key_shape: Shape,
    cos_shape: Shape,
    dtype: str,
    table_dtype: str,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> str | None:
    """Return the limit of npu_apply_rotary_pos_emb that a call breaks, or None.

    Document of 2026-08-03, for Atlas A2 and A3; Ascend 950 supports more.
    """
    reason = dtype_limit("query", dtype) or same_dtype_limit("cos and sin", table_dtype, "query's", dtype)
    if reason is not None:
        return reason
    if layout not in ("BSND", "TND"):
        return f"layout must be 'BSND' or 'TND', got {layout!r}"
    if rotary_mode != "half":
        return f"rotary_mode must be 'half', got {rotary_mode!r}"
    if len(query_shape) != len(layout) or len(key_shape) != len(layout):
        return f"{layout} query and key must be {len(layout)}-D, got {tuple(query_shape)} and {tuple(key_shape)}"
    if (reason := empty_limit(query_shape, key_shape)) is not None:
        return reason
    if query_shape[-1] not in (64, 128) or key_shape[-1] != query_shape[-1]:
        return f"head size must be 64 or 128 in query and key, got {query_shape[-1]} and {key_shape[-1]}"
    tokens = tuple(query_shape[:-2])
    if tuple(key_shape[:-2]) != tokens or tuple(cos_shape) != (*tokens, 1, query_shape[-1]):
        return f"cos and sin must be {(*tokens, 1, query_shape[-1])} (no broadcast), got {tuple(cos_shape)}"
    return None


def rotary_embedding_limit(
    *, query_shape: Shape, key_shape: Shape, positions_shape: Shape, rotary_dim: int, head_size: int, dtype: str
) -> str | None:
    """Return the limit of ATB's _npu_rotary_embedding that a call breaks, or None.

    It is not documented; the limits are from its source of 2026-08-21.
    """
    if (reason := dtype_limit("query", dtype, HALF)) is not None:
        return reason
    if len(query_shape) != 2 or len(key_shape) != 2 or len(positions_shape) != 1:
        return f"query and key must be 2-D and positions 1-D, got {tuple(query_shape)} and {tuple(positions_shape)}"
    if not query_shape[0] == key_shape[0] == positions_shape[0]:
        return f"query, key and positions have {query_shape[0]}, {key_shape[0]} and {positions_shape[0]} tokens"
    if rotary_dim != head_size:
        return f"partial rotary is not supported: rotary size {rotary_dim}, head_size {head_size}"
    return None


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
