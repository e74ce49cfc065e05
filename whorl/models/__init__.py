"""Models by Hugging Face's architecture name. Each is one file, imported when a model of its kind is loaded.

Architectures that are not supported are refused by name, with what is known of them: `unsupported.py`.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .unsupported import refusal

ARCHITECTURES = {
    "DeepseekV32ForCausalLM": "whorl.models.deepseek:DeepSeek",
    "DeepseekV3ForCausalLM": "whorl.models.deepseek:DeepSeek",
    "Gemma3ForCausalLM": "whorl.models.gemma3:Gemma3",
    "Glm46VForConditionalGeneration": "whorl.models.glm4v:Glm4v",
    "Glm4MoeForCausalLM": "whorl.models.glm4_moe:Glm4Moe",
    "Glm4vForConditionalGeneration": "whorl.models.glm4v:Glm4v",
    "Glm4vMoeForConditionalGeneration": "whorl.models.glm4v:Glm4vMoe",
    "GptOssForCausalLM": "whorl.models.gpt_oss:GptOss",
    "LlamaForCausalLM": "whorl.models.llama:Llama",
    "MistralForCausalLM": "whorl.models.mistral:Mistral",
    "Qwen2ForCausalLM": "whorl.models.qwen2:Qwen2",
    "Qwen2VLForConditionalGeneration": "whorl.models.qwen2_vl:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "whorl.models.qwen2_vl:Qwen2VL",
    "Qwen3ForCausalLM": "whorl.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "whorl.models.qwen3:Qwen3",
    "Qwen3VLForConditionalGeneration": "whorl.models.qwen3_vl:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "whorl.models.qwen3_vl:Qwen3VL",
}


def architecture(values: Mapping[str, Any]) -> str:
    """Return the supported architecture that a config.json names; ValueError where it names none. Needs no torch."""
    names = values.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    hint = next((reason for name in names if (reason := refusal(str(name)))), "") if isinstance(names, list) else ""
    raise ValueError(f"config.json: architectures is {names}; known are {', '.join(ARCHITECTURES)}{hint}")


def find(values: Mapping[str, Any]) -> Any:
    """Return the class of a model from the values of its config.json; raises ValueError for an unknown architecture."""
    module, _, class_name = ARCHITECTURES[architecture(values)].partition(":")
    return getattr(import_module(module), class_name)


__all__ = ["ARCHITECTURES", "architecture", "find", "refusal"]
