"""Limits of matmuls: plain, batched, grouped, and fused with a collective.

The document that a docstring names by its date is the vendor's page of the operator.
"""

from collections.abc import Sequence

from .contract import Shape
from .shared import HALF, INNER, dims_limit, dtype_limit, empty_limit, same_dtype_limit


def linear_limit(*, shape: Shape, weight_shape: Shape, dtype: str, bias_dtype: str | None = None) -> str | None:
    """Return the limit of npu_linear that a call breaks, or None. Document of 2026-05-13."""
    reason = dtype_limit("input", dtype) or dims_limit("input and weight", (2,), shape, weight_shape)
    return reason or same_dtype_limit("bias", bias_dtype, "input's", dtype)


def transpose_batchmatmul_limit(
    *, shape: Shape, weight_shape: Shape, dtype: str, weight_dtype: str, is_transposed: bool
) -> str | None:
    """Return the limit of npu_transpose_batchmatmul that a call breaks, or None.

    input [B, M, K], or [M, B, K] where perm_x1 is [1, 0, 2] (is_transposed); weight [B, K, N]; any strides. Document of
    2026-07-14.
    """
    reason = dtype_limit("input", dtype) or same_dtype_limit("weight", weight_dtype, "input's", dtype)
    if (reason := reason or dims_limit("input and weight", (3,), shape, weight_shape)) is not None:
        return reason
    batch, inner, width = weight_shape
    if not (0 < batch < INNER and 0 < width < INNER and 0 < inner * (batch if is_transposed else 1) < INNER):
        product = "K * B" if is_transposed else "K"
        return f"B, N and {product} must be below {INNER}, got {batch}, {width} and K {inner}"
    return f"K and N must be multiples of 16, got {inner} and {width}" if inner % 16 or width % 16 else None


def grouped_matmul_limit(
    *,
    shapes: Sequence[Shape],
    weight_shapes: Sequence[Shape],
    dtype: str,
    weight_dtype: str,
    groups: int | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
) -> str | None:
    """Return the limit of npu_grouped_matmul without quantisation that a call breaks, or None.

    groups: the length of group_list. Document of 2026-08-05.
    """
    if (reason := dtype_limit("x", dtype) or same_dtype_limit("weight", weight_dtype, "x's", dtype)) is not None:
        return reason
    if max(len(shapes), len(weight_shapes)) > 128:
        return f"x and weight must be lists of at most 128 tensors, got {len(shapes)} and {len(weight_shapes)}"
    if widest := [shape for shape in (*shapes, *weight_shapes) if shape[-1] >= INNER]:
        return f"the last dim must be below {INNER}, got {tuple(widest[0])}"
    if act_type:
        return f"act_type must be 0 without quantisation, got {act_type}"
    if group_type not in (-1, 0, 2):
        return f"group_type must be -1, 0 or 2, got {group_type}"
    if (group_type == -1) != (split_item in (0, 1)):
        return f"group_type -1 needs split_item 0 or 1, the other types 2 or 3, got {group_type} and {split_item}"
    return _group_limit(groups, len(weight_shapes), group_type, group_list_type)


def _group_limit(groups: int | None, num_weights: int, group_type: int, group_list_type: int) -> str | None:
    if group_type == -1:
        return None if groups is None else "group_type -1 must have no group_list"
    if groups is None:
        return None if num_weights > 1 else "group_list is needed to divide one x"
    if groups > 1024:
        return f"group_list must have at most 1024 groups, got {groups}"
    return "a group_list of counts must have more than one group" if group_list_type == 1 and groups == 1 else None


COMMUNICATING_RANKS = (2, 4, 8)  # ranks of one server; the fused kernels are not documented for other numbers


def all_gather_mm_limit(*, shape: Shape, weight_shape: Shape, dtype: str, world: int) -> str | None:
    """Return the limit of npu_all_gather_base_mm or npu_mm_all_reduce_base that a call breaks, or None.

    Both are without quantisation and have the same limits; shape: that of one rank's rows. Documents of 2026-07-23.
    """
    reason = dtype_limit("input", dtype, HALF) or dims_limit("input and x2", (2,), shape, weight_shape)
    if reason is not None:
        return reason
    if not 256 <= shape[1] < 65535:
        return f"the inner size must be in [256, 65535), got {shape[1]}"
    if world not in COMMUNICATING_RANKS:
        return f"supports {', '.join(map(str, COMMUNICATING_RANKS))} ranks, got {world}"
    return empty_limit(shape, weight_shape)


mm_all_reduce_limit = all_gather_mm_limit


def mm_reduce_scatter_limit(*, shape: Shape, weight_shape: Shape, dtype: str, world: int) -> str | None:
    """Return the limit of npu_mm_reduce_scatter_base without quantisation that a call breaks, or None.

    The number of rows must be a multiple of the ranks, and there is no bias. Document of 2026-08-06.
    """
    reason = all_gather_mm_limit(shape=shape, weight_shape=weight_shape, dtype=dtype, world=world)
    if reason is not None:
        return reason
    return f"the rows must be a multiple of the {world} ranks, got {shape[0]}" if shape[0] % world else None
