"""Tiny random models of transformers, and their inputs, for the tests of the adapter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.models.llama import Llama

transformers = pytest.importorskip("transformers", minversion="5.17")

QK_NORM = ["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"]
FAMILIES = ["llama", *QK_NORM, "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"]
MORE = {"head_dim": 16, "rms_norm_eps": 1e-3, "pad_token_id": 0, "tie_word_embeddings": False}
SIZES = {name: value for name, value in Llama.tiny(**MORE).items() if name not in ("architectures", "model_type")}
# Every expert is chosen: a rounding error may not send a token elsewhere.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4}
_QWEN3_5: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# By vision family: its class prefix, the tower, fields of the text config, and what `rope_parameters` says.
VISION_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VL", VISION, {}, {"mrope_interleaved": True}),
    "qwen3_vl_moe": ("Qwen3VLMoe", VISION, {}, {"mrope_interleaved": True}),
    "qwen2_vl": ("Qwen2VL", _TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, {"head_dim": None}, {}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _TOWER
        | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        | {"window_size": 16, "fullatt_block_indexes": [1]},
        {"head_dim": None},
        {},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"},
        _QWEN3_5,
        {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"},
        _QWEN3_5 | {"shared_expert_intermediate_size": 24},
        {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
    ),
    "glm4v": (
        "Glm4v",
        _TOWER | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "image_size": 16},
        {"head_dim": None},
        {"partial_rotary_factor": 0.5},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        _TOWER | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "image_size": 16},
        {"n_routed_experts": 4, "first_k_dense_replace": 1},
        {"partial_rotary_factor": 0.5},
    ),
}
IMAGE, VISION_START, VISION_END = 90, 91, 92
SECTIONS = {16: [3, 3, 2], 8: [2, 1, 1], 4: [1, 1, 0]}  # by rotated channels


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model whose parameters, norms included, are far from their usual starting values."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **(EXPERTS if family.endswith("moe") else {}), **changes}
    if family in VISION_FAMILIES:
        kind, tower, more, rotation = VISION_FAMILIES[family]
        sizes = {name: value for name, value in {**sizes, **more}.items() if value is not None}
        head = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        sections = SECTIONS[int(head * rotation.get("partial_rotary_factor", 1))]
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": sections, **rotation}
        tokens = {"image_token_id": IMAGE, "video_token_id": 93}
        start, end = ("image_start", "image_end") if kind.startswith("Glm") else ("vision_start", "vision_end")
        tokens |= {f"{start}_token_id": VISION_START, f"{end}_token_id": VISION_END}
        text = {"rope_parameters": rope, **sizes}
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=tower, **tokens)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    else:
        kind = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
        sizes = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, **sizes}
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else parameter.shape[-1] ** -0.5))
            if "norm" in name:
                parameter.add_(1)
    return model.eval()


def make_inputs(family: str, device: str = "cpu") -> dict[str, Tensor]:
    """Two sequences, the first left padded; for vision models both with an image, so that the three axes differ."""
    torch.manual_seed(1)
    ids = torch.randint(1, 80, (2, 14))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    if family not in VISION_FAMILIES:
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    ids[:, 5] = VISION_START
    ids[:, 6:10] = IMAGE
    ids[:, 10] = VISION_END
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4),
    }
    return {name: value.to(device) for name, value in inputs.items()}
