"""Limits of the operators that route tokens to experts.

The document that a docstring names by its date is the vendor's page of the operator.
"""

from .contract import Shape
from .shared import FLOATS, dims_limit, dtype_limit, empty_limit, same_dtype_limit


def moe_gating_top_k_softmax_limit(*, shape: Shape, k: int, dtype: str) -> str | None:
    """Return the limit of npu_moe_gating_top_k_softmax that a call breaks, or None. Document of 2026-05-18."""
    if (reason := dtype_limit("x", dtype) or dims_limit("x", (2, 3), shape)) is not None:
        return reason
    return f"k must be at most 1024, got {k}" if k > 1024 else empty_limit(shape)


def moe_gating_top_k_limit(
    *, shape: Shape, dtype: str, bias_dtype: str | None = None, group_count: int = 1, renorm: int = 0
) -> str | None:
    """Return the limit of npu_moe_gating_top_k that a call breaks, or None. Document of 2026-07-11."""
    reason = (
        dtype_limit("x", dtype) or dims_limit("x", (2,), shape) or same_dtype_limit("bias", bias_dtype, "x's", dtype)
    )
    if reason is not None:
        return reason
    if shape[1] > 2048:
        return f"x must have at most 2048 experts, got {shape[1]}"
    size = shape[1] // group_count
    if size <= 2:
        return f"a group must have more than two experts, got {size}"
    if -(-size // 32) * 32 * group_count > 2048:
        return f"group size, rounded up to 32, times group_count must be at most 2048, got {size} and {group_count}"
    return f"renorm must be 0, got {renorm}" if renorm else empty_limit(shape)


def moe_init_routing_limit(
    *,
    shape: Shape,
    dtype: str,
    ids_dtype: str,
    expert_num: int,
    drop_pad_mode: int = 0,
    expert_capacity: int = -1,
    expert_tokens_num_type: int = 0,
    active_expert_range: Shape = (),
    quant_mode: int = -1,
) -> str | None:
    """Return the limit of npu_moe_init_routing_v2 that a call breaks, or None.

    quant_mode: -1 for no quantisation, 0 for static and 1 for dynamic int8. Document of 2026-08-05. The operator's
    defaults are within the limits, except that of expert_num, which must be passed.
    """
    if (reason := dtype_limit("x", dtype, (*FLOATS, "int8"))) is not None:
        return reason
    if ids_dtype != "int32":
        return f"expert_idx must be int32, got {ids_dtype}"
    if expert_tokens_num_type not in (0, 1, 2):
        return f"expert_tokens_num_type must be 0, 1 or 2, got {expert_tokens_num_type}"
    limit = 5120 if expert_tokens_num_type == 2 else 10240
    if not 0 <= expert_num <= limit:
        return f"expert_num must be 0 to {limit}, got {expert_num}"
    if drop_pad_mode not in (0, 1):
        return f"drop_pad_mode must be 0 or 1, got {drop_pad_mode}"
    if quant_mode not in (-1, 0, 1) or (quant_mode >= 0 and dtype == "int8"):
        return f"quant_mode must be -1, or 0 or 1 for x that is not int8, got {quant_mode}"
    first, last = active_expert_range or (0, expert_num)
    if not 0 <= first <= last <= expert_num:
        return f"active_expert_range must be within the {expert_num} experts, got {list(active_expert_range)}"
    if drop_pad_mode == 0:
        return None
    if (first, last) != (0, expert_num):
        return f"drop_pad_mode 1 needs all experts, got active_expert_range {list(active_expert_range)}"
    if not 0 < expert_capacity <= shape[0]:
        return f"expert_capacity must be 1 to {shape[0]} (the rows of x) with drop_pad_mode 1, got {expert_capacity}"
    return None


def moe_finalize_routing_limit(
    *,
    shape: Shape,
    dtype: str,
    scales_dtype: str | None = None,
    index_dtype: str = "int32",
    drop_pad_mode: int = 0,
    has_skips: tuple[bool, bool] = (False, False),
) -> str | None:
    """Return the limit of npu_moe_finalize_routing that a call breaks, or None.

    has_skips: whether skip1 and skip2 are passed. Document of 2026-08-10.
    """
    reason = dtype_limit("expanded_permuted_rows", dtype)
    if (reason := reason or same_dtype_limit("scales", scales_dtype, "the rows'", dtype)) is not None:
        return reason
    if index_dtype != "int32":
        return f"expanded_src_to_dst_row must be int32, got {index_dtype}"
    if drop_pad_mode not in range(4):
        return f"drop_pad_mode must be 0 to 3, got {drop_pad_mode}"
    return "skip2 needs skip1; pass a single one as skip1" if has_skips == (False, True) else empty_limit(shape)


def moe_token_permute_limit(*, shape: Shape, dtype: str, top_k: int) -> str | None:
    """Return the limit of npu_moe_token_permute and npu_moe_token_unpermute that a call breaks, or None.

    op-plugin does not document them; the limits are those of aclnnMoeTokenPermute, which they call (2025).
    """
    if (reason := dtype_limit("tokens", dtype)) is not None:
        return reason
    return f"a token must have at most 512 experts, got {top_k}" if top_k > 512 else empty_limit(shape)
