"""Configs of models that are benchmarked with random weights."""

import json
from pathlib import Path
from typing import Any

from whorl.engine.weights.quantize import KEPT
from whorl.models.deepseek_v32 import DeepSeekV32Config
from whorl.nn.weights import SCHEME_NAMES, rounding_to

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "bfloat16",
}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# DeepSeek-V3.2 at full width with fewer layers, the first of them without experts. An expert has 44 M weights, so 256
# experts in 3 layers are 34 G weights: the model takes 74 GB in bf16 and 39 GB in FP8. In 7 layers the experts take
# 81 GB in FP8 (86 GB with the other weights), and 166 GB in bf16, which does not fit an H200: with 128 experts the bf16
# model takes 87 GB.
_DEEPSEEK = DeepSeekV32Config(num_hidden_layers=4, first_k_dense_replace=1, rope_factor=40.0).to_hf("bfloat16")
_FP8 = rounding_to("fp8", {}, "ue8m0").settings([])


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, expert: int = 0) -> dict[str, Any]:
    """Return the sizes of a Qwen3, with experts of a width or without."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = dict(zip(names, (hidden, layers, heads, kv_heads, intermediate), strict=True))
    return sizes | ({"moe_intermediate_size": expert} if expert else {})


PRESETS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_MOE | _sizes(2048, 48, 32, 4, 6144, 768),
    "Qwen3-0.6B": _QWEN3 | _sizes(1024, 28, 16, 8, 3072) | {"tie_word_embeddings": True},
    "DeepSeek-V3.2-4L": _DEEPSEEK,
    "DeepSeek-V3.2-4L-FP8": _DEEPSEEK | {"quantization_config": _FP8},
    "DeepSeek-V3.2-8L-FP8": _DEEPSEEK | {"num_hidden_layers": 8, "quantization_config": _FP8},
    "DeepSeek-V3.2-8L-128E": _DEEPSEEK | {"num_hidden_layers": 8, "n_routed_experts": 128},
    "Qwen3-8B": _QWEN3 | _sizes(4096, 36, 32, 8, 12288),
    "Qwen3-235B-A22B": _QWEN3_MOE | _sizes(4096, 94, 64, 4, 12288, 1536),
}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Return the config of gpt-oss as it is published, its experts in MXFP4."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **_sizes(2880, layers, 64, 8, 2880),
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        "dtype": "bfloat16",
    }


PRESETS |= {"gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128)}
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_TEXT = {
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}


def _with_vision(text: dict[str, Any], kind: str, architecture: str) -> dict[str, Any]:
    """Return the config of a vision model; its text model is Qwen3 with multimodal positions."""
    kept_fields = {name: value for name, value in text.items() if name not in ("architectures", "rope_theta", "dtype")}
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": kept_fields | _TEXT | {"model_type": f"{kind}_text"},
        "vision_config": _VISION | {"model_type": f"{kind}_vision", "out_hidden_size": text["hidden_size"]},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


PRESETS["Qwen3-VL-30B-A3B"] = _with_vision(
    PRESETS["Qwen3-30B-A3B"], "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"
)
PRESETS["Qwen3-VL-8B"] = _with_vision(PRESETS["Qwen3-8B"], "qwen3_vl", "Qwen3VLForConditionalGeneration")
# Qwen3.5's sizes: dense ones have a feed-forward width, the others experts and a shared one of the same width.
_QWEN3_5: dict[str, Any] = {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "rms_norm_eps": 1e-6,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}


def _qwen3_5(text: dict[str, Any], value_heads: int, *, is_sparse: bool) -> dict[str, Any]:
    """Return the config of a Qwen3.5 as it is published, with vision."""
    kind, name = ("qwen3_5_moe", "Qwen3_5Moe") if is_sparse else ("qwen3_5", "Qwen3_5")
    vision = {key: value for key, value in _VISION.items() if key != "deepstack_visual_indexes"}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": _QWEN3_5 | text | {"linear_num_value_heads": value_heads, "model_type": f"{kind}_text"},
        "vision_config": vision | {"model_type": kind, "out_hidden_size": text["hidden_size"]},
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


_MOE = {"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
PRESETS["Qwen3.5-35B-A3B"] = _qwen3_5(_sizes(2048, 40, 16, 2, 512, 512) | _MOE, 32, is_sparse=True)
PRESETS["Qwen3.5-27B"] = _qwen3_5(_sizes(5120, 64, 24, 4, 17408), 48, is_sparse=False)
PRESETS["Qwen3.5-0.8B"] = _qwen3_5(_sizes(1024, 24, 8, 2, 3584), 16, is_sparse=False) | {"tie_word_embeddings": True}

_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")  # the columns of matrices, which groups divide


def _quantised(config: dict[str, Any], scheme: str) -> dict[str, Any]:
    """Return the config with the `quantization_config` of published checkpoints: FP8 blocks (Qwen3-*-FP8) or groups."""
    if scheme == "fp8":
        settings = rounding_to(scheme, {}, "float").settings(["lm_head"])
    else:
        sizes = config | config.get("text_config", {})
        columns = {name: sizes[name] for name in _WIDTHS if name in sizes}
        settings = rounding_to(scheme, columns).settings(list(KEPT))
    return {**config, "quantization_config": settings}


def read_config(name: str) -> dict[str, Any]:
    """Return a preset or the values of a config.json; a suffix such as ":w4a16" adds a quantisation.

    Raises ValueError when the name is neither.
    """
    plain, _, scheme = name.rpartition(":")
    if plain and scheme in SCHEME_NAMES:
        return _quantised(read_config(plain), scheme)
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(PRESETS)
        raise ValueError(f"--random-config is {name}, expected one of {known}, or a config.json: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--random-config {name}: the file has a {type(values).__name__}, expected a JSON object")
    return values
