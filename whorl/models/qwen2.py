"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and sliding windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whorl.models import llama
from whorl.models.llama_config import LlamaConfig, layer_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Config(LlamaConfig):
    """config.json of Qwen2."""

    windows: tuple[int | None, ...]

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        return LlamaConfig.read(values) | {
            "windows": layer_windows(values),
            "attention_bias": True,
            "mlp_bias": False,
        }

    @property
    def output_bias(self) -> bool:
        return False

    def window(self, layer: int) -> int | None:
        return self.windows[layer]


class Qwen2(llama.Llama):
    """Llama with biases of queries, keys and values, and sliding windows."""

    config_class: type[Qwen2Config] = Qwen2Config

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        return super().tiny(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | changes)
