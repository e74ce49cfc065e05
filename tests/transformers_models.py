"""Tiny random models of transformers, and their inputs, for the tests of the adapter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.models.llama import Llama

transformers = pytest.importorskip("transformers", minversion="5.17")

FAMILIES = ["llama", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"]
QK_NORM = FAMILIES[1:]
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
IMAGE, VISION_START, VISION_END = 90, 91, 92
SECTIONS = [3, 3, 2]


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model whose parameters, norms included, are far from their usual starting values."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **(EXPERTS if family.endswith("moe") else {}), **changes}
    if "vl" in family:
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTIONS, "mrope_interleaved": True}
        tokens = {
            "image_token_id": IMAGE,
            "video_token_id": 93,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
        text = {"rope_parameters": rope, **sizes}
        kind = "Qwen3VLMoe" if family.endswith("moe") else "Qwen3VL"
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=VISION, **tokens)
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
    """Two sequences, the first left padded; for Qwen3-VL both with an image, so that the three axes differ."""
    torch.manual_seed(1)
    ids = torch.randint(1, 80, (2, 14))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    if "vl" not in family:
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
