"""Models by Hugging Face's architecture name. Each is one file, imported when a model of its kind is loaded.

Architectures that have no file run through the code of transformers (`any_model`). Those that cannot are refused by
name, with the reason and with what is known of them: `unsupported.py`.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .fields import BACKEND
from .unsupported import refusal

ARCHITECTURES = {
    "DeepseekV32ForCausalLM": "whorl.models.deepseek:DeepSeek",
    "DeepseekV3ForCausalLM": "whorl.models.deepseek:DeepSeek",
    "Gemma3ForCausalLM": "whorl.models.gemma3:Gemma3",
    "Glm46VForConditionalGeneration": "whorl.models.glm4v:Glm4v",
    "Glm4MoeForCausalLM": "whorl.models.glm4_moe:Glm4Moe",
    "Glm4MoeLiteForCausalLM": "whorl.models.glm4_moe_lite:Glm4MoeLite",
    "Glm4vForConditionalGeneration": "whorl.models.glm4v:Glm4v",
    "Glm4vMoeForConditionalGeneration": "whorl.models.glm4v:Glm4vMoe",
    "GlmMoeDsaForCausalLM": "whorl.models.glm_moe_dsa:GlmMoeDsa",
    "GptOssForCausalLM": "whorl.models.gpt_oss:GptOss",
    "LlamaForCausalLM": "whorl.models.llama:Llama",
    "MistralForCausalLM": "whorl.models.mistral:Mistral",
    "Qwen2ForCausalLM": "whorl.models.qwen2:Qwen2",
    "Qwen2VLForConditionalGeneration": "whorl.models.qwen2_vl:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "whorl.models.qwen2_vl:Qwen2VL",
    "Qwen3ForCausalLM": "whorl.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "whorl.models.qwen3:Qwen3",
    "Qwen3NextForCausalLM": "whorl.models.qwen3_next:Qwen3Next",
    "Qwen3VLForConditionalGeneration": "whorl.models.qwen3_vl:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "whorl.models.qwen3_vl:Qwen3VL",
    "Qwen3_5ForCausalLM": "whorl.models.qwen3_5:Qwen3_5Text",
    "Qwen3_5ForConditionalGeneration": "whorl.models.qwen3_5:Qwen3_5",
    "Qwen3_5MoeForCausalLM": "whorl.models.qwen3_5:Qwen3_5Text",
    "Qwen3_5MoeForConditionalGeneration": "whorl.models.qwen3_5:Qwen3_5",
}


def architecture(values: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names and that has a file; ValueError where it names none. Needs no
    torch."""
    name = _named(values)
    if name is None:
        raise ValueError(f"{_unknown(values)}{_hint(values)}")
    return name


def _named(values: Mapping[str, Any]) -> str | None:
    names = values.get("architectures") or []
    names = names if isinstance(names, list) else []
    return next((name for name in names if isinstance(name, str) and name in ARCHITECTURES), None)


def _unknown(values: Mapping[str, Any]) -> str:
    return f"config.json: architectures is {values.get('architectures') or []}; known are {', '.join(ARCHITECTURES)}"


def _hint(values: Mapping[str, Any]) -> str:
    names = values.get("architectures") or []
    return next((reason for name in names if (reason := refusal(str(name)))), "") if isinstance(names, list) else ""


def find(values: Mapping[str, Any]) -> Any:
    """Return the class of a model from the values of its config.json: its own, or `AnyModel` where it has none.

    Raises ValueError for a model that runs neither way, with both reasons. `BACKEND` in the values chooses one way.
    """
    backend, name = values.get(BACKEND, "auto"), _named(values)
    if backend == "native" or (backend == "auto" and name is not None):
        module, _, class_name = ARCHITECTURES[architecture(values)].partition(":")
        return getattr(import_module(module), class_name)
    from .any_model import AnyModel, RefusedError

    try:
        AnyModel.config_class.from_hf(values)
    except RefusedError as error:
        if backend == "transformers":
            raise ValueError(f"config.json: backend is transformers: {error}") from error
        raise ValueError(f"{_unknown(values)}. Through transformers' code: {error}{_hint(values)}") from error
    return AnyModel


__all__ = ["ARCHITECTURES", "BACKEND", "architecture", "find", "refusal"]
