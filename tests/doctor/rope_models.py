"""Published configurations, as their config.json spells them, with the transformers classes that read them."""

import importlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Real:
    name: str
    config_class: str
    rotary_class: str
    values: dict[str, Any]
    layer_type: str | None = None
    expected: dict[str, Any] = field(default_factory=dict)

    def of_transformers(self) -> tuple[Any, Any]:
        """(the text configuration object, its rotary module)."""
        package, _, name = self.config_class.partition(":")
        root = f"transformers.models.{package}"
        config = getattr(importlib.import_module(f"{root}.configuration_{package}"), name)(**self.values)
        text = getattr(config, "text_config", config)
        rotary = getattr(importlib.import_module(f"{root}.modeling_{package}"), self.rotary_class)
        return config, rotary(text)


QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 128, "rope_theta": 1000000.0, "rope_scaling": None}
QWEN3_30B = {**QWEN3_MOE, "hidden_size": 2048, "num_attention_heads": 32, "max_position_embeddings": 40960}
QWEN3_235B = {**QWEN3_MOE, "hidden_size": 4096, "num_attention_heads": 64, "max_position_embeddings": 40960}
YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
QWEN2_VL = {
    "model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "rope_scaling": MROPE,
}  # fmt: skip
QWEN2_5_VL = {**QWEN2_VL, "model_type": "qwen2_5_vl", "max_position_embeddings": 128000}
QWEN3_VL = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "model_type": "qwen3_vl_moe_text", "head_dim": 128, "hidden_size": 2048, "num_attention_heads": 32,
        "max_position_embeddings": 262144, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "head_dim": 256, "hidden_size": 4096, "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
GLM4V = {
    "model_type": "glm4v",
    "text_config": {
        "model_type": "glm4v_text", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 65536,
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    },
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v32", "hidden_size": 7168, "num_attention_heads": 128, "max_position_embeddings": 163840,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
DEEPSEEK_V2 = {
    **DEEPSEEK, "model_type": "deepseek_v2", "hidden_size": 5120,
    "rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
LLAMA_3_1 = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
PHI3_LONG = [
    1.07, 1.12, 1.15, 1.42, 1.57, 1.8, 2.13, 2.13, 3.01, 5.91, 6.95, 9.07, 9.93, 10.71, 11.13, 14.61, 15.41, 19.81,
    37.28, 38.28, 38.6, 40.12, 46.2, 50.94, 53.66, 54.93739, 56.89739, 57.28739, 59.98738, 60.86739, 60.88739, 61.71739,
    62.91739, 62.95739, 63.41739, 63.81739, 63.83739, 63.8974, 63.9374, 64.0674, 64.11435, 64.12435, 64.15435, 64.19435,
    64.24435, 64.57436, 64.69, 64.76,
]  # fmt: skip
PHI3_SHORT = [1.1] * 3 + [1.3, 1.35, 1.35, 1.4, 1.55] + [2.0] * 17 + [2.05] * 6 + [2.1, 2.1, 2.15] + [2.25] * 5
PHI3_SHORT += [2.4, 2.45, 2.5, 2.7, 2.7, 2.75, 2.8, 2.9, 3.05]
PHI3 = {
    "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "long_factor": PHI3_LONG, "short_factor": PHI3_SHORT},
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32,
        "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "num_hidden_layers": 62,
    },
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "hidden_size": 2560,
    "num_attention_heads": 8, "max_position_embeddings": 131072,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}  # fmt: skip
ERNIE_VL = {
    "model_type": "ernie4_5_vl_moe",
    "text_config": {
        "model_type": "ernie4_5_vl_moe_text", "hidden_size": 2560, "num_attention_heads": 20,
        "max_position_embeddings": 131072,
        "rope_parameters": {"mrope_section": [22, 22, 20], "rope_theta": 500000.0, "rope_type": "default"},
    },
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64,
    "max_position_embeddings": 131072, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
HUNYUAN = {
    "model_type": "hunyuan_v1_dense", "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32,
    "max_position_embeddings": 32768, "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
}  # fmt: skip
HUNYUAN_VL = {
    "model_type": "hunyuan_vl",
    "text_config": {
        "model_type": "hunyuan_vl_text", "head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16,
        "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "xdrope", "xdrope_section": [16, 16, 16, 16],
        },
    },
}  # fmt: skip

CHUNKED = {"style": "half", "layout": "chunked", "rotary_dim": 128, "sections": (16, 24, 24)}
MLA = {"style": "pairs", "pairs_out": "half", "where": "trailing", "head_dim": 192, "rotary_dim": 64}
REAL = [
    Real("qwen3-30b-a3b", "qwen3_moe:Qwen3MoeConfig", "Qwen3MoeRotaryEmbedding", QWEN3_30B,
         expected={"style": "half", "sections": None, "rotary_dim": 128, "base": 1e6}),
    Real("qwen3-235b-a22b", "qwen3_moe:Qwen3MoeConfig", "Qwen3MoeRotaryEmbedding", QWEN3_235B),
    Real("qwen3-235b-a22b-2507", "qwen3_moe:Qwen3MoeConfig", "Qwen3MoeRotaryEmbedding",
         {**QWEN3_235B, "rope_theta": 5000000, "max_position_embeddings": 262144}),
    Real("qwen3-235b-a22b-yarn", "qwen3_moe:Qwen3MoeConfig", "Qwen3MoeRotaryEmbedding",
         {**QWEN3_235B, "rope_scaling": YARN4}, expected={"rope_type": "yarn", "table_rows": 131072}),
    Real("qwen2-vl-7b", "qwen2_vl:Qwen2VLConfig", "Qwen2VLRotaryEmbedding", QWEN2_VL, expected=CHUNKED),
    Real("qwen2.5-vl-7b", "qwen2_5_vl:Qwen2_5_VLConfig", "Qwen2_5_VLRotaryEmbedding", QWEN2_5_VL, expected=CHUNKED),
    Real("qwen3-vl-30b-a3b", "qwen3_vl_moe:Qwen3VLMoeConfig", "Qwen3VLMoeTextRotaryEmbedding", QWEN3_VL,
         expected={"style": "half", "layout": "interleaved", "sections": (24, 20, 20), "base": 5e6}),
    Real("qwen3.5-moe", "qwen3_5_moe:Qwen3_5MoeConfig", "Qwen3_5MoeTextRotaryEmbedding", QWEN3_5,
         expected={"layout": "interleaved", "sections": (11, 11, 10), "head_dim": 256, "rotary_dim": 64}),
    Real("glm-4.1v-9b", "glm4v:Glm4vConfig", "Glm4vTextRotaryEmbedding", GLM4V,
         expected={"style": "pairs", "pairs_out": "pairs", "layout": "chunked", "sections": (8, 12, 12),
                   "head_dim": 128, "rotary_dim": 64}),
    Real("deepseek-v3.2", "deepseek_v32:DeepseekV32Config", "DeepseekV32RotaryEmbedding", DEEPSEEK,
         expected={**MLA, "rope_type": "deepseek_yarn", "attention_factor": 1.0}),
    Real("deepseek-v3", "deepseek_v3:DeepseekV3Config", "DeepseekV3RotaryEmbedding",
         {**DEEPSEEK, "model_type": "deepseek_v3"}, expected=MLA),
    Real("llama-3.1-8b", "llama:LlamaConfig", "LlamaRotaryEmbedding", LLAMA_3_1,
         expected={"rope_type": "llama3", "style": "half", "rotary_dim": 128}),
    Real("phi-3-mini-128k", "phi3:Phi3Config", "Phi3RotaryEmbedding", PHI3,
         expected={"rope_type": "longrope", "original_max_position": 4096, "rotary_dim": 96}),
    Real("gemma-3-27b-local", "gemma3:Gemma3Config", "Gemma3RotaryEmbedding", GEMMA3, "sliding_attention",
         expected={"rope_type": "default", "base": 1e4}),
    Real("gemma-3-27b-global", "gemma3:Gemma3Config", "Gemma3RotaryEmbedding", GEMMA3, "full_attention",
         expected={"rope_type": "linear", "base": 1e6, "factor": 8.0}),
    Real("gemma-4-local", "gemma4:Gemma4TextConfig", "Gemma4TextRotaryEmbedding", GEMMA4, "sliding_attention",
         expected={"head_dim": 256, "rope_type": "default"}),
    Real("gemma-4-global", "gemma4:Gemma4TextConfig", "Gemma4TextRotaryEmbedding", GEMMA4, "full_attention",
         expected={"head_dim": 512, "rotary_dim": 512, "rope_type": "proportional"}),
    Real("ernie-4.5-vl", "ernie4_5_vl_moe:Ernie4_5_VLMoeConfig", "Ernie4_5_VLMoeTextRotaryEmbedding", ERNIE_VL,
         expected={"style": "pairs", "layout": "hwt", "sections": (22, 22, 20)}),
    Real("gpt-oss-20b", "gpt_oss:GptOssConfig", "GptOssRotaryEmbedding", GPT_OSS, expected={"truncate": False}),
    Real("hunyuan-7b", "hunyuan_v1_dense:HunYuanDenseV1Config", "HunYuanDenseV1RotaryEmbedding", HUNYUAN,
         expected={"alpha": 1000.0, "rope_type": "dynamic"}),
    Real("hunyuan-ocr", "hunyuan_vl:HunYuanVLConfig", "HunYuanVLRotaryEmbedding", HUNYUAN_VL,
         expected={"sections": (16, 16, 16, 16), "layout": "chunked", "alpha": 1000.0}),
]  # fmt: skip
