"""Limits of the operators that route tokens to experts."""

from math import prod

from .contract import Shape
from .dtypes import FLOATS, dtype_limit


def moe_gating_top_k_softmax_limit(*, shape: Shape, k: int, dtype: str) -> str | None:
    """Limits of npu_moe_gating_top_k_softmax: 2-D or 3-D logits, k at most 1024."""
    if (reason := dtype_limit("x", dtype, FLOATS)) is not None:
        return reason
    if len(shape) not in (2, 3):
        return f"x must be 2-D or 3-D, got {tuple(shape)}"
    if k > 1024:
        return f"k must be at most 1024, got {k}"
    return None if prod(shape) else f"empty tensors are not taken, got {tuple(shape)}"


def moe_gating_top_k_limit(
    *, shape: Shape, dtype: str, bias_dtype: str | None = None, group_count: int = 1, renorm: int = 0
) -> str | None:
    """Limits of npu_moe_gating_top_k: 2-D logits, at most 2048 experts, groups of more than two."""
    if (reason := dtype_limit("x", dtype, FLOATS)) is not None:
        return reason
    if len(shape) != 2:
        return f"x must be 2-D, got {tuple(shape)}"
    if bias_dtype not in (None, dtype):
        return f"bias must have x's dtype {dtype}, got {bias_dtype}"
    if shape[1] > 2048:
        return f"at most 2048 experts, got {shape[1]}"
    size = shape[1] // group_count
    if size <= 2:
        return f"a group has more than two experts, got {size}"
    if -(-size // 32) * 32 * group_count > 2048:
        return f"groups of {size}, rounded up to 32, times {group_count} is more than 2048"
    if renorm:
        return f"renorm must be 0, got {renorm}"
    return None if prod(shape) else f"empty tensors are not taken, got {tuple(shape)}"


def moe_init_routing_limit(
    *,
    shape: Shape,
    dtype: str,
    ids_dtype: str,
    expert_num: int,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 1,
    expert_tokens_num_flag: bool = True,
    quant_mode: int = -1,
) -> str | None:
    """Limits of npu_moe_init_routing_v2: no drop, counts asked for, unquantised or dynamic int8."""
    if (reason := dtype_limit("x", dtype, (*FLOATS, "int8"))) is not None:
        return reason
    if ids_dtype != "int32":
        return f"expert_idx must be int32, got {ids_dtype}"
    most = 5120 if expert_tokens_num_type == 2 else 10240
    if not 0 < expert_num <= most:
        return f"expert_num must be 1 to {most}, got {expert_num}"
    if drop_pad_mode:
        return f"drop_pad_mode must be 0, got {drop_pad_mode}"
    if expert_tokens_num_type not in (1, 2) or not expert_tokens_num_flag:
        return (
            "expert_tokens_num_type must be 1 or 2 with expert_tokens_num_flag, got "
            f"{expert_tokens_num_type}, {expert_tokens_num_flag}"
        )
    if quant_mode not in (-1, 1) or (quant_mode == 1 and dtype == "int8"):
        return f"quant_mode must be -1, or 1 for x that is not int8, got {quant_mode}"
    return None if prod(shape) else f"empty tensors are not taken, got {tuple(shape)}"


def moe_finalize_routing_limit(
    *, shape: Shape, dtype: str, scales_dtype: str | None = None, index_dtype: str = "int32", drop_pad_mode: int = 0
) -> str | None:
    """Limits of npu_moe_finalize_routing: scales in the rows' dtype, an int32 index.

    Its page documents drop_pad_mode 0; the kernel behind it, aclnnMoeFinalizeRoutingV2, documents 0 to 3.
    """
    if (reason := dtype_limit("expanded_permuted_rows", dtype, FLOATS)) is not None:
        return reason
    if scales_dtype not in (None, dtype):
        return f"scales must have the rows' dtype {dtype}, got {scales_dtype}"
    if index_dtype != "int32":
        return f"expanded_src_to_dst_row must be int32, got {index_dtype}"
    if drop_pad_mode not in range(4):
        return f"drop_pad_mode must be 0 to 3, got {drop_pad_mode}"
    return None if prod(shape) else f"empty tensors are not taken, got {tuple(shape)}"


def moe_token_permute_limit(*, shape: Shape, dtype: str, top_k: int) -> str | None:
    """Limits of npu_moe_token_permute and npu_moe_token_unpermute."""
    if (reason := dtype_limit("tokens", dtype, FLOATS)) is not None:
        return reason
    if top_k > 512:
        return f"a token has at most 512 experts, got {top_k}"
    return None if prod(shape) else f"empty tensors are not taken, got {tuple(shape)}"
