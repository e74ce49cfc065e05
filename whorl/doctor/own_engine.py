"""Which rotary operators whorl's own engine runs: in the text of a model, and in its vision tower."""

from collections.abc import Mapping
from typing import Any

from whorl import contracts
from whorl.doctor.launch import Launch

# Branch, operator, why, and what was passed over.
Choice = tuple[str, str, str, tuple[tuple[str, str], ...]]
_FUSED = (("torch", "the engine's operators are fused"),)
_APART = (("npu_rotary_mul", "it takes q and k apart"),)


def text(launch: Launch) -> Choice:
    """Axes are merged once a step, before any layer."""
    model = launch.text or {}
    is_normed = str(model.get("model_type")).startswith(("qwen3", "gemma3"))
    if launch.device != "npu":
        kernel = "whorl::qk_norm_rope_write" if is_normed else "whorl::rope"
        because = f"{kernel} takes q and k as they come from their projection" + ", with their norms" * is_normed
        return "text", "whorl", because, _FUSED
    refusal = _mrope_refusal(launch, launch.rope.head_dim if launch.rope else int(model.get("head_dim") or 128))
    if is_normed and refusal is None:
        because = "q and k are normed, and turned by rows that the engine has looked up and merged"
        return "text", "npu_mrope", because, _APART
    passed = (("npu_mrope", refusal or "q and k are one tensor here, and it takes two"),)
    return "text", "npu_rotary_mul", "rows are looked up and merged once a step", passed


def tower(launch: Launch) -> Choice | None:
    """Rows and columns turn half of a head each. None: a model without a tower."""
    vision = (launch.inputs.model or {}).get("vision_config")
    if not isinstance(vision, Mapping) or not all(isinstance(vision.get(n), int) for n in ("hidden_size", "num_heads")):
        return None
    head = vision["hidden_size"] // max(vision["num_heads"], 1)
    because = f"whorl::rope turns heads of {head} channels by rows and columns of patches, whose angles are made once"
    if launch.device != "npu":
        return "tower", "whorl", because, _FUSED
    refusal = _mrope_refusal(launch, head)
    if refusal is None:
        return "tower", "npu_mrope", because, _APART
    return "tower", "npu_rotary_mul", because, (("npu_mrope", refusal),)


def _mrope_refusal(launch: Launch, head: int) -> str | None:
    dtype = str((launch.text or {}).get("dtype") or "bfloat16").removeprefix("torch.")
    shapes: dict[str, Any] = {"query_shape": (1, head), "key_shape": (1, head), "positions_shape": (1,)}
    return contracts.mrope_limit(**shapes, rotary_dim=head, head_size=head, dtype=dtype, table_dtype=dtype)
