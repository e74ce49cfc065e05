"""Limits of the operators of gated delta layers: the convolution, and the rule by chunks and token by token.

They are those of the vendor's pages.
"""

from .contract import Shape
from .shared import HALF, dims_limit, dtype_limit, empty_limit, same_dtype_limit

STATES = ("bfloat16",)  # fp32 is documented for Ascend 950 alone
TAPS = 3  # the width of the convolution that npu_fused_causal_conv1d has
MOST_TOKENS = 8  # of a sequence in one call of npu_recurrent_gated_delta_rule


def chunk_gated_delta_rule_limit(
    *,
    shape: Shape,
    value_shape: Shape,
    dtype: str,
    beta_dtype: str | None,
    state_dtype: str | None,
    g_dtype: str | None,
) -> str | None:
    """Return the limit of npu_chunk_gated_delta_rule that a call breaks, or None. Page as of November 2026."""
    for name, kind in (("beta", beta_dtype), ("initial_state", state_dtype)):
        if kind is None:
            return _required(name)
    limit = _heads_limit(shape, value_shape, heads=64, dim=128)
    return limit or _dtypes_limit(dtype, beta_dtype, state_dtype, g_dtype)


def recurrent_gated_delta_rule_limit(
    *,
    shape: Shape,
    value_shape: Shape,
    num_states: int,
    longest: int,
    dtype: str,
    beta_dtype: str | None,
    state_dtype: str | None,
    g_dtype: str | None,
) -> str | None:
    """Return the limit of npu_recurrent_gated_delta_rule that a call breaks, or None. Page as of November 2026.

    num_states: those in `state`; longest: the tokens of the longest sequence.
    """
    if longest > MOST_TOKENS:
        return f"a sequence must have 1 to {MOST_TOKENS} tokens, got {longest}"
    if num_states < shape[0]:
        return f"state must have as many matrices as there are tokens, {shape[0]}, got {num_states}"
    if beta_dtype is None:
        return _required("beta")
    limit = _heads_limit(shape, value_shape, heads=256, dim=512)
    return limit or _dtypes_limit(dtype, beta_dtype, state_dtype, g_dtype)


def fused_causal_conv1d_limit(
    *, shape: Shape, weight_shape: Shape, dtype: str, weight_dtype: str, conv_states_dtype: str
) -> str | None:
    """Return the limit of npu_fused_causal_conv1d that a call breaks, or None. Page as of November 2026.

    The document names Atlas 350 alone. Its bias and activation have no effect.
    """
    if (reason := dims_limit("x", (2, 3), shape) or empty_limit(shape)) is not None:
        return reason
    if weight_shape[0] != TAPS:
        return f"weight must have {TAPS} taps, [{TAPS}, dim], got {tuple(weight_shape)}"
    if not 64 <= shape[-1] <= 16384 or shape[-1] % 16:
        return f"dim must be a multiple of 16 from 64 to 16384, got {shape[-1]}"
    kinds = {"weight": weight_dtype, "conv_states": conv_states_dtype}
    return dtype_limit("x", dtype, HALF) or next(
        (reason for name, kind in kinds.items() if (reason := same_dtype_limit(name, kind, "x's", dtype))), None
    )


def _heads_limit(shape: Shape, value_shape: Shape, *, heads: int, dim: int) -> str | None:
    limit = dims_limit("query and value", (3,), shape, value_shape) or empty_limit(shape, value_shape)
    if limit is not None:
        return limit
    for name, sizes in (("key", shape), ("value", value_shape)):
        if sizes[1] > heads or sizes[2] > dim:
            return f"at most {heads} {name} heads of {dim} channels are supported, got {sizes[1]} of {sizes[2]}"
    return None


def _dtypes_limit(dtype: str, beta_dtype: str | None, state_dtype: str | None, g_dtype: str | None) -> str | None:
    if g_dtype not in (None, "float32"):
        return f"g must be float32, got {g_dtype}"
    kinds = {"query": dtype, "beta": beta_dtype, "the state": state_dtype}
    limits = (dtype_limit(name, kind, STATES) for name, kind in kinds.items() if kind is not None)
    return next((limit for limit in limits if limit is not None), None)


def _required(name: str) -> str:
    return f"{name} is required, got None"
