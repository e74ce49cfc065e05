"""Predict which rotary operators whorl's own engine runs, for the language model and for the vision tower."""

from collections.abc import Mapping
from typing import Any

from whorl import contracts
from whorl.doctor.launch import Launch

# The arguments of paths._path after the launch: branch, operator, reason, and the operators that are not chosen, each
# with its reason.
Prediction = tuple[str, str, str, tuple[tuple[str, str], ...]]
_FUSED = (("torch", "the engine's operators are fused"),)
_ONE_TENSOR_A_CALL = (("npu_rotary_mul", "it rotates one tensor a call, so q and k need two calls"),)


def predict_text(launch: Launch) -> Prediction:
    """Return the rotary operator of the language model.

    The engine looks up cos and sin and merges the MRoPE axes once a step, before the first layer, so the operator of a
    layer always applies plain RoPE.
    """
    model = launch.text or {}
    is_normed = str(model.get("model_type")).startswith(("qwen3", "gemma3"))
    if launch.device != "npu":
        kernel = "whorl::qk_norm_rope_write" if is_normed else "whorl::rope"
        because = f"{kernel} reads q and k from the output of their projection" + " and applies their norms" * is_normed
        return "text", "whorl", because, _FUSED
    refusal = _mrope_refusal(launch, launch.rope.head_dim if launch.rope else int(model.get("head_dim") or 128))
    if is_normed and refusal is None:
        because = "q and k are normed, then rotated by cos and sin that the engine has looked up and merged"
        return "text", "npu_mrope", because, _ONE_TENSOR_A_CALL
    passed = (("npu_mrope", refusal or "q and k are one tensor here, and it takes two"),)
    return "text", "npu_rotary_mul", "cos and sin are looked up and merged once a step", passed


def predict_tower(launch: Launch) -> Prediction | None:
    """Return the rotary operator of the vision tower, or None for a model without one.

    The patch's row rotates one half of a head, its column the other half.
    """
    vision = (launch.inputs.model or {}).get("vision_config")
    if not isinstance(vision, Mapping) or not all(isinstance(vision.get(n), int) for n in ("hidden_size", "num_heads")):
        return None
    head = vision["hidden_size"] // max(vision["num_heads"], 1)
    because = f"whorl::rope rotates heads of {head} channels by rows and columns of patches; angles are computed once"
    if launch.device != "npu":
        return "tower", "whorl", because, _FUSED
    refusal = _mrope_refusal(launch, head)
    if refusal is None:
        return "tower", "npu_mrope", because, _ONE_TENSOR_A_CALL
    return "tower", "npu_rotary_mul", because, (("npu_mrope", refusal),)


def _mrope_refusal(launch: Launch, head: int) -> str | None:
    """Return the documented limit of npu_mrope that heads of this size break, or None."""
    dtype = str((launch.text or {}).get("dtype") or "bfloat16").removeprefix("torch.")
    shapes: dict[str, Any] = {"query_shape": (1, head), "key_shape": (1, head), "positions_shape": (1,)}
    return contracts.mrope_limit(**shapes, rotary_dim=head, head_size=head, dtype=dtype, table_dtype=dtype)
