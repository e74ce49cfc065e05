"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and sliding windows."""

from collections.abc import Mapping
from typing import Any

from whorl.models import llama
from whorl.models.llama_config import BIASES, LlamaConfig, layer_windows


class Qwen2Config(LlamaConfig):
    """config.json of Qwen2."""

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        biases = dict.fromkeys(BIASES, False) | {"attention_bias": True}
        return LlamaConfig.read(values) | {"windows": layer_windows(values)} | biases


class Qwen2(llama.Llama):
    """Llama with biases of queries, keys and values, and sliding windows."""

    config_class: type[Qwen2Config] = Qwen2Config

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        return super().tiny(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | changes)
