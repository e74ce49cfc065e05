"""Limits of operators along the last dim: norms, activations, quantisation.

The document that a docstring names by its date is the vendor's page of the operator.
"""

from .contract import Shape
from .shared import HALF, dtype_limit, empty_limit


def rms_norm_limit(*, shape: Shape, gamma_shape: Shape, dtype: str, gamma_dtype: str) -> str | None:
    """Return the limit of npu_rms_norm that a call breaks, or None. Document of 2026-06-17."""
    if (reason := dtype_limit("input", dtype)) is not None:
        return reason
    if gamma_dtype not in (dtype, "float32"):
        return f"gamma must be {dtype} or float32, got {gamma_dtype}"
    return _gamma_limit(shape, gamma_shape)


def _gamma_limit(shape: Shape, gamma_shape: Shape) -> str | None:
    trailing = tuple(shape[len(shape) - len(gamma_shape) :])
    if not gamma_shape or len(gamma_shape) > len(shape) or tuple(gamma_shape) != trailing:
        return f"gamma must have the trailing dimensions of {tuple(shape)}, got {tuple(gamma_shape)}"
    return None


def add_rms_norm_limit(
    *, shape: Shape, x2_shape: Shape | None = None, gamma_shape: Shape, dtype: str, gamma_dtype: str
) -> str | None:
    """Return the limit of npu_add_rms_norm that a call breaks, or None. Document of 2026-07-09."""
    if (reason := dtype_limit("x1", dtype)) is not None:
        return reason
    if x2_shape is not None and tuple(x2_shape) != tuple(shape):
        return f"x1 and x2 must have the same shape, got {tuple(shape)} and {tuple(x2_shape)}"
    if gamma_dtype != dtype:
        return f"gamma must be {dtype}, got {gamma_dtype}"
    return _gamma_limit(shape, gamma_shape) or empty_limit(shape)


def swiglu_limit(*, shape: Shape, dim: int = -1, dtype: str, contiguous: bool = True) -> str | None:
    """Return the limit of npu_swiglu that a call breaks, or None. Document of 2026-08-10."""
    return geglu_limit(shape=shape, dim=dim, dtype=dtype) or (None if contiguous else "input must be contiguous")


def geglu_limit(*, shape: Shape, dim: int = -1, dtype: str) -> str | None:
    """Return the limit of npu_geglu that a call breaks, or None.

    The limits are those of ge_glu_v2, as CANN's ops-nn documents it in 2025; npu_swiglu has the same.
    """
    if (reason := dtype_limit("input", dtype)) is not None:
        return reason
    if not 1 <= len(shape) <= 8 or not -len(shape) <= dim < len(shape):
        return f"input must have 1 to 8 dimensions with dim {dim} among them, got {tuple(shape)}"
    if shape[dim] % 2:
        return f"size along dim {dim} must be even, got {shape[dim]}"
    return empty_limit(shape)


def dynamic_quant_limit(*, shape: Shape, dtype: str, format: str = "int8") -> str | None:
    """Return the limit of npu_dynamic_quant with one scale per token that a call breaks, or None.

    format: "int8" or "quint4x2"; eight codes of quint4x2 are packed into one int32, so the last dim must be a multiple
    of 8. Document of 2026-07-03.
    """
    if format not in ("int8", "quint4x2"):
        return f"dst_type must be int8 or quint4x2 on Atlas A2 and A3, got {format!r}"
    if (reason := dtype_limit("input", dtype, HALF)) is not None:
        return reason
    if len(shape) < 2:
        return f"input must have two dimensions or more, got {tuple(shape)}"
    if format == "quint4x2" and shape[-1] % 8:
        return f"the last dim must be a multiple of 8 for quint4x2, got {shape[-1]}"
    return empty_limit(shape)
