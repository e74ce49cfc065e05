"""Limits of matmuls with weights of 8 and 4 bits.

int4: eight codes of neighbouring outputs are one int32, as npu_convert_weight_to_int4pack packs a weight [K, N].
"""

from .contract import Shape
from .shared import HALF, INNER, dims_limit, dtype_limit, empty_limit, same_dtype_limit

WIDEST = 65535  # the largest K and N
GROUP = 32  # the group size of scales must be a multiple of it
WEIGHTS = ("int8", "int4")
WORD = 8  # int4 codes in one int32


def quant_matmul_limit(*, shape: Shape, weight_shape: Shape, dtype: str, output_dtype: str) -> str | None:
    """Return the limit of npu_quant_matmul on int8 tensors with a scale per token that a call breaks, or None.

    shape: of x1 [T, K]; weight_shape: of x2 [K, N]. The limits are those of op-plugin's page, read in November 2026
    (commit 22e8a33).
    """
    if dtype != "int8":
        return f"x1 and x2 must be int8, got {dtype}"
    return dtype_limit("the result", output_dtype, HALF) or _size_limit(shape, weight_shape)


def weight_quant_matmul_limit(
    *, shape: Shape, weight_shape: Shape, dtype: str, weight_dtype: str, scale_dtype: str, group: int = 0
) -> str | None:
    """Return the limit of npu_weight_quant_batchmatmul that a call breaks, or None; weight [K, N] int8 or int4.

    group: how many of the K inputs share a scale, 0 for all of them. The limits are those of op-plugin's page, read in
    November 2026 (commit 22e8a33), which has the same for both.
    """
    if (reason := _antiquant_limit(weight_shape, dtype, weight_dtype, scale_dtype)) is not None:
        return reason
    if group and (group % GROUP or group >= weight_shape[0]):
        return f"antiquant_group_size must be a multiple of {GROUP} below K = {weight_shape[0]}, got {group}"
    return _size_limit(shape, weight_shape)


def _antiquant_limit(weight_shape: Shape, dtype: str, weight_dtype: str, scale_dtype: str) -> str | None:
    """Return what both matmuls of 16-bit activations and packed weights [.., K, N] refuse, or None."""
    reason = dtype_limit("x", dtype, HALF) or dtype_limit("weight", weight_dtype, WEIGHTS)
    if (reason := reason or same_dtype_limit("antiquant_scale", scale_dtype, "x's", dtype)) is not None:
        return reason
    if weight_dtype == "int4" and weight_shape[-1] % WORD:
        return f"N must be a multiple of {WORD} for int4, got {weight_shape[-1]}"
    return None


def _size_limit(shape: Shape, weight_shape: Shape) -> str | None:
    reason = dims_limit("x and weight", (2,), shape, weight_shape) or empty_limit(shape, weight_shape)
    if reason is not None:
        return reason
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
        return dtype_limit("the result", output_dtype, HALF)
    if scale_dtype != expected:
        return f"scale must be {expected} for a result in {output_dtype}, got {scale_dtype}"
    return _groups_limit(weight_shape)


def antiquant_grouped_matmul_limit(
    *, weight_shape: Shape, dtype: str, weight_dtype: str, scale_dtype: str, group: int = 0, symmetric: bool = True
) -> str | None:
    """Return the limit of npu_grouped_matmul with weights [E, K, N] in int8 or int4 that a call breaks, or None.

    group: how many of the K inputs share a scale, 0 for all of them; symmetric: whether every antiquant_offset is 0.
    The limits are those of op-plugin's page, read in November 2026 (commit 02ea475); that groups must be symmetric is
    on the page of aclnnGroupedMatmulV5, read in November 2026.
    """
    if (reason := _antiquant_limit(weight_shape, dtype, weight_dtype, scale_dtype)) is not None:
        return reason
    if group and weight_dtype == "int8":
        return f"int8 needs one scale per output channel, got groups of {group}"
    if group and weight_shape[1] % group:
        return f"K must be a multiple of the group, got {weight_shape[1]} and {group}"
    if group and not symmetric:
        return f"int4 in groups must be symmetric, got zero points and groups of {group}"
    return _groups_limit(weight_shape)


def _groups_limit(weight_shape: Shape) -> str | None:
    if max(weight_shape[1:]) >= INNER:
        return f"the last dim must be below {INNER}, got {tuple(weight_shape)}"
    return None if 1 < weight_shape[0] <= 1024 else f"weight must have 2 to 1024 groups, got {weight_shape[0]}"
