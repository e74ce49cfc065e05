"""Limits of the matrix products of int8 weights."""

from .contract import Shape
from .dtypes import dtype_limit

HALF = ("float16", "bfloat16")
WIDEST = 65535  # of K and N
INNER = 65536  # a grouped product's last dims are below
GROUP = 32  # columns, of which a group has a multiple


def quant_matmul_limit(*, shape: Shape, weight_shape: Shape, dtype: str, output_dtype: str) -> str | None:
    """Limits of npu_quant_matmul of int8 with a scale a token: to float16 or bfloat16, nothing empty; weight [K, N].

    op-plugin's page as read in November 2026 (commit 22e8a33).
    """
    if dtype != "int8":
        return f"x1 and x2 must be int8, got {dtype}"
    if (reason := dtype_limit("the result", output_dtype, HALF)) is not None:
        return reason
    return _size_limit(shape, weight_shape)


def weight_quant_matmul_limit(
    *, shape: Shape, weight_shape: Shape, dtype: str, weight_dtype: str, scale_dtype: str, group: int = 0
) -> str | None:
    """Limits of npu_weight_quant_batchmatmul of int8; weight [K, N]; group: columns of a scale, 0 for all of them.

    op-plugin's page as read in November 2026 (commit 22e8a33).
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
        return f"two dimensions are taken, got {tuple(shape)} and {tuple(weight_shape)}"
    if not all((*shape, *weight_shape)):
        return f"empty tensors are not taken, got {tuple(shape)} and {tuple(weight_shape)}"
    return None if max(weight_shape) <= WIDEST else f"K and N must be at most {WIDEST}, got {tuple(weight_shape)}"


def quant_grouped_matmul_limit(*, weight_shape: Shape, dtype: str, scale_dtype: str, output_dtype: str) -> str | None:
    """Limits of npu_grouped_matmul of int8 with a scale a token: bfloat16 wants scales of bfloat16, float16 of float32.

    op-plugin's page as read in November 2026 (commit 02ea475); weight [E, K, N].
    """
    if dtype != "int8":
        return f"x and weight must be int8, got {dtype}"
    wanted = {"bfloat16": "bfloat16", "float16": "float32"}.get(output_dtype)
    if wanted is None:
        return f"the result must be one of {', '.join(HALF)}, got {output_dtype}"
    if scale_dtype != wanted:
        return f"scale must be {wanted} for a result in {output_dtype}, got {scale_dtype}"
    return _groups_limit(weight_shape)


def antiquant_grouped_matmul_limit(
    *, weight_shape: Shape, dtype: str, weight_dtype: str, scale_shape: Shape, scale_dtype: str
) -> str | None:
    """Limits of npu_grouped_matmul of int8 weights: a scale a row, [E, N] or [E, N, 1], in x's dtype; weight [E, K, N].

    op-plugin's page as read in November 2026 (commit 02ea475).
    """
    if (reason := dtype_limit("x", dtype, HALF)) is not None:
        return reason
    if weight_dtype != "int8":
        return f"weight must be int8, got {weight_dtype}"
    if scale_dtype != dtype:
        return f"antiquant_scale must have x's dtype {dtype}, got {scale_dtype}"
    if len(scale_shape) == 3 and scale_shape[2] != 1:
        return f"int8 takes a scale for each row, got {scale_shape[2]} groups"
    return _groups_limit(weight_shape)


def _groups_limit(weight_shape: Shape) -> str | None:
    if max(weight_shape[1:]) >= INNER:
        return f"the last dim must be below {INNER}, got {tuple(weight_shape)}"
    return None if 1 < weight_shape[0] <= 1024 else f"2 to 1024 groups are taken, got {weight_shape[0]}"
