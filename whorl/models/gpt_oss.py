"""gpt-oss: attention with a sink for each head, windows in every other layer, and clipped experts with biases."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.models import llama
from whorl.models.fields import count, flag, number
from whorl.models.llama_config import BIASES, LlamaConfig, windows_of
from whorl.nn import (
    ClippedExperts,
    Destination,
    Formats,
    KVCache,
    Normed,
    Packed,
    PlainLinear,
    Ranks,
    Step,
    Weighted,
    attend,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssConfig(LlamaConfig):
    """config.json of gpt-oss by its own names."""

    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        values = {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 128, **values}
        if not values.get("rope_parameters") and not values.get("rope_scaling"):
            values |= {"rope_parameters": {"rope_theta": values.get("rope_theta") or 150000.0, **_YARN}}
        layers = count(values, "num_hidden_layers")
        kinds = values.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        experts, per_token = count(values, "num_local_experts", 128), count(values, "num_experts_per_tok", 4)
        if per_token > experts:
            raise ValueError(f"config.json: num_experts_per_tok is {per_token}, expected at most {experts} experts")
        has_bias = flag(values, "attention_bias", True)
        return LlamaConfig.read(values) | {
            **dict.fromkeys(BIASES, has_bias),
            "windows": windows_of(values, kinds),
            "num_local_experts": experts,
            "num_experts_per_tok": per_token,
            "swiglu_alpha": number(values, "swiglu_alpha", 1.702),
            "swiglu_limit": number(values, "swiglu_limit", 7.0),
        }


# The rotation where the file names none, as in Hugging Face's class.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


class Sinks(Weighted):
    """One number for each of this rank's query heads. heads: those of all; part: this rank's."""

    weight: Tensor

    def __init__(self, heads: int, part: slice) -> None:
        super().__init__()
        self.heads, self.part = heads, part

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        values = torch.empty(self.part.stop - self.part.start, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(values, requires_grad=False))

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        yield name, Destination(into=self.weight, shape=(self.heads,), index=(self.part,))

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(generator=generator)


class Attention(llama.Attention):
    """Llama's attention with sinks."""

    def __init__(self, config: GptOssConfig, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        part, _ = ranks.heads(config.num_attention_heads, config.num_key_value_heads)
        self.sinks = Sinks(config.num_attention_heads, part)

    def mix_packed(self, qkv: Tensor, rotary: Tensor, packed: Packed) -> Tensor:
        options = {"scale": self.scale, "window": self.window or 0}
        sinks = self.sinks.weight
        return ops.causal_attention(*self.heads(qkv, rotary), packed.starts, sinks, **options)[0].flatten(1)  # type: ignore[no-any-return]

    def mix(self, qkv: Tensor, rotary: Tensor, step: Step, cache: KVCache) -> Tensor:
        q = self.rotate(qkv, rotary, step, cache)
        sinks = self.sinks.weight
        return attend(q, step, cache, scale=self.scale, window=self.window, sinks=sinks).flatten(1)


class MoE(Normed):
    """Routes each token to the experts with the highest logits and adds their outputs, weighted by their softmax."""

    def __init__(self, config: GptOssConfig, ranks: Ranks) -> None:
        super().__init__()
        self.router = PlainLinear(config.hidden_size, config.num_local_experts, bias=True)
        self.k = config.num_experts_per_tok
        self.experts = ClippedExperts(
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
            per_token=self.k,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
            ranks=ranks,
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = ops.route(self.router(x), self.k)
        return self.experts(x, weights, ids)


class Layer(llama.Layer):
    """A decoder layer of attention with sinks and of experts."""

    def attention(self, config: Any, layer: int, ranks: Ranks) -> Attention:
        return Attention(config, layer, ranks)

    def feed_forward(self, config: Any, layer: int, ranks: Ranks) -> Normed:
        return MoE(config, ranks)


class GptOss(llama.Llama):
    """gpt-oss for the engine."""

    config_class: type[GptOssConfig] = GptOssConfig
    layer_class = Layer

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests: a layer with a window, one without and one with."""
        return super().tiny(
            **{
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "hidden_size": 64,
                "intermediate_size": 64,
                "head_dim": 16,
                "num_hidden_layers": 3,
                "sliding_window": 9,
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                **changes,
            }
        )
