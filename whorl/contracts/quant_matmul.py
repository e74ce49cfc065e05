"""Limits of matmuls with int8 weights."""

from .contract import Shape
from .dtypes import dtype_limit

HALF = ("float16", "bfloat16")
WIDEST = 65535  # the largest K and N
INNER = 65536  # every last dim of a grouped matmul must be below it
GROUP = 32  # the group size of scales must be a multiple of it


def quant_matmul_limit(*, shape: Shape, weight_shape: Shape, dtype: str, output_dtype: str) -> str | None:
    """Return the limit of npu_quant_matmul on int8 tensors with a scale per token that a call breaks, or None.

    shape: of x1 [T, K]; weight_shape: of x2 [K, N]. The limits are those of op-plugin's page, read in November 2026
    (commit 22e8a33).
    """
    if dtype != "int8":
        return f"x1 and x2 must be int8, got {dtype}"
    if (reason := dtype_limit("the result", output_dtype, HALF)) is not None:
        return reason
    return _size_limit(shape, weight_shape)


def weight_quant_matmul_limit(
    *, shape: Shape, weight_shape: Shape, dtype: str, weight_dtype: str, scale_dtype: str, group: int = 0
) -> str | None:
    """Return the limit of npu_weight_quant_batchmatmul with int8 weights that a call breaks, or None; weight [K, N].

    group: how many of the K inputs share a scale, 0 for all of them. The limits are those of op-plugin's page, read in
    November 2026 (commit 22e8a33).
    """
    if (reason := dtype_limit("x", dtype, HALF)) is not None:
        return reason
    if weight_dtype != "int8":
        return f"weight must be int8, got {weight_dtype}"
    if scale_dtype != dtype:
        return f"antiquant_scale must have x's dtype {dtype}, got {scale_dtype}"
    if group and (group % GROUP or group >= weight_shape[0]):
        return f"antiquant_group_size must be a multiple of {GROUP} below K = {weight_shape[0]}, got {group}"
    return _size_limit(shape, weight_shape)


def _size_limit(shape: Shape, weight_shape: Shape) -> str | None:
    if len(shape) != 2 or len(weight_shape) != 2:
        return f"x and weight must be 2-D, got {tuple(shape)} and {tuple(weight_shape)}"
    if not all((*shape, *weight_shape)):
        return f"empty tensors are not supported, got {tuple(shape)} and {tuple(weight_shape)}"
    return None if max(weight_shape) <= WIDEST else f"K and N must be at most {WIDEST}, got {tuple(weight_shape)}"


def quant_grouped_matmul_limit(*, weight_shape: Shape, dtype: str, scale_dtype: str, output_dtype: str) -> str | None:
    """Return the limit of npu_grouped_matmul on int8 tensors with a scale per token that a call breaks, or None.

    weight_shape: [E, K, N]. A bfloat16 result needs bfloat16 scales, a float16 result float32 scales. The limits are
    those of op-plugin's page, read in November 2026 (commit 02ea475).
    """
    if dtype != "int8":
        return f"x and weight must be int8, got {dtype}"
    expected = {"bfloat16": "bfloat16", "float16": "float32"}.get(output_dtype)
    if expected is None:
        return f"the result must be one of {', '.join(HALF)}, got {output_dtype}"
    if scale_dtype != expected:
        return f"scale must be {expected} for a result in {output_dtype}, got {scale_dtype}"
    return _groups_limit(weight_shape)


def antiquant_grouped_matmul_limit(
    *, weight_shape: Shape, dtype: str, weight_dtype: str, scale_shape: Shape, scale_dtype: str
) -> str | None:
    """Return the limit of npu_grouped_matmul with int8 weights [E, K, N] that a call breaks, or None.

    scale_shape: of antiquant_scale, which has one scale per output channel, [E, N] or [E, N, 1], in x's dtype. The
    limits are those of op-plugin's page, read in November 2026 (commit 02ea475).
    """
    if (reason := dtype_limit("x", dtype, HALF)) is not None:
        return reason
    if weight_dtype != "int8":
        return f"weight must be int8, got {weight_dtype}"
    if scale_dtype != dtype:
        return f"antiquant_scale must have x's dtype {dtype}, got {scale_dtype}"
    if len(scale_shape) == 3 and scale_shape[2] != 1:
        return f"int8 needs one scale per output channel, got {scale_shape[2]} groups"
    return _groups_limit(weight_shape)


def _groups_limit(weight_shape: Shape) -> str | None:
    if max(weight_shape[1:]) >= INNER:
        return f"the last dim must be below {INNER}, got {tuple(weight_shape)}"
    return None if 1 < weight_shape[0] <= 1024 else f"weight must have 2 to 1024 groups, got {weight_shape[0]}"
