"""Mistral: Llama with one sliding window in every layer, or none."""

from collections.abc import Mapping
from typing import Any

from whorl.models import llama
from whorl.models.fields import count
from whorl.models.llama_config import BIASES, LlamaConfig


class MistralConfig(LlamaConfig):
    """config.json of Mistral."""

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        # Defaults of Hugging Face's class; a null sliding_window means none, as in Mistral-7B from v0.2 on.
        values = {"sliding_window": 4096, "num_key_value_heads": 8, **values}
        size = None if values["sliding_window"] is None else count(values, "sliding_window")
        windows = (size,) * count(values, "num_hidden_layers")
        return LlamaConfig.read(values) | {"windows": windows} | dict.fromkeys(BIASES, False)


class Mistral(llama.Llama):
    """Llama with one sliding window in every layer, or none."""

    config_class: type[MistralConfig] = MistralConfig

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
        return super().tiny(**names | changes)
