"""The text model of Gemma 3.

Norms stand before and after each part of a layer and multiply by (1 + weight); the gate is GELU; local layers with a
window and their own frequencies alternate with global ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whorl import ops
from whorl.models import llama, qwen3
from whorl.models.fields import count, number
from whorl.models.llama_config import LlamaConfig, windows_of
from whorl.nn import KVCache, Mix, Normed, Packed, Ranks, RMSNorm, Rope, Step
from whorl.rope_config import RopeConfig

# Defaults of Hugging Face's class.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_DEFAULTS |= {"max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_EVERY = 6  # every sixth layer is global
_UNSUPPORTED = {
    "attn_logit_softcapping": "softcaps are Gemma 2's",
    "final_logit_softcapping": "softcaps are Gemma 2's",
    "use_bidirectional_attention": "bidirectional attention is EmbeddingGemma's",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3Config(LlamaConfig):
    """config.json of Gemma 3; `rope` is of the layers that attend to all keys, `local_rope` of those with a window."""

    local_rope: RopeConfig
    query_pre_attn_scalar: float

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        values = _DEFAULTS | dict(values)
        for name, feature in _UNSUPPORTED.items():
            if values.get(name):
                raise ValueError(f"config.json: {name} is {values[name]!r}: {feature} and not supported")
        if (activation := values["hidden_activation"]) != "gelu_pytorch_tanh":
            raise ValueError(f"config.json: hidden_activation is {activation!r}, expected gelu_pytorch_tanh")
        every, layers = count(values, "sliding_window_pattern", _EVERY), count(values, "num_hidden_layers")
        kinds = values.get("layer_types") or [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
        rope, local = (RopeConfig.from_hf(values, layer_type=f"{kind}_attention") for kind in ("full", "sliding"))
        return LlamaConfig.sizes(values) | {
            "rope": rope,
            "local_rope": replace(local, max_position=rope.table_rows),
            "windows": windows_of(values, kinds),
            "query_pre_attn_scalar": number(values, "query_pre_attn_scalar", 256),
        }

    @property
    def qk_norm(self) -> bool:
        return True


class Ropes:
    """The two rotary tables; `rows` returns the pair (rows for local layers, rows for global layers)."""

    def __init__(self, config: Gemma3Config, max_length: int | None) -> None:
        self.full = Rope(config.rope, max_length)
        self.max_length = self.full.max_length
        self.local = Rope(config.local_rope, self.max_length)

    def rows(self, step: Step | Packed) -> tuple[Tensor, Tensor]:
        return self.local.rows(step), self.full.rows(step)


class Attention(qwen3.Attention):
    """Qwen3's attention with Gemma's scale. `rotary` is the pair of `Ropes.rows`; global layers have no window."""

    plus_one = True

    def __init__(self, config: Any, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        self.scale = config.query_pre_attn_scalar**-0.5

    def heads(self, qkv: Tensor, rotary: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().heads(qkv, rotary[self.window is None])

    def rotate(self, qkv: Tensor, rotary: Any, step: Step, cache: KVCache) -> Tensor:
        return super().rotate(qkv, rotary[self.window is None], step, cache)


class MLP(llama.MLP):
    """Feed-forward network with a GELU gate."""

    def gated(self, gate_up: Tensor) -> Tensor:
        return ops.glu.unchecked(gate_up, activation="gelu_tanh")  # type: ignore[no-any-return]


class Layer(llama.Layer):
    """A decoder layer with norms before and after attention and the feed-forward part."""

    def __init__(self, config: Gemma3Config, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        self.pre_feedforward_layernorm = self.norm(config)
        self.post_feedforward_layernorm = self.norm(config)

    @classmethod
    def norm(cls, config: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)

    def attention(self, config: Gemma3Config, layer: int, ranks: Ranks) -> Attention:
        return Attention(config, layer, ranks)

    def feed_forward(self, config: Gemma3Config, layer: int, ranks: Ranks) -> Normed:
        return MLP(config, layer, ranks)

    def forward(self, x: Tensor, residual: Tensor | None, mix: Mix) -> tuple[Tensor, Tensor]:
        x, residual = self.mixer.after_norm(self.input_layernorm, x, residual, mix)
        x, _ = self.post_attention_layernorm(x, None)
        x, residual = self.mlp.after_norm(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(x, None)[0], residual


class Gemma3(llama.Llama):
    """The text model of Gemma 3."""

    config_class: type[Gemma3Config] = Gemma3Config
    layer_class = Layer

    def __init__(self, config: Gemma3Config, **options: Any) -> None:
        super().__init__(config, **options)
        # The factor is rounded to the embeddings' dtype before the product, as in Gemma's training.
        scale = torch.tensor(config.hidden_size**0.5, device="cpu")
        self.scales = {dtype: float(scale.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def tables(self, config: Any, max_length: int | None) -> Ropes:
        return Ropes(config, max_length)

    def embed(self, token_ids: Tensor) -> Tensor:
        x = super().embed(token_ids)
        return x * self.scales[x.dtype]

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests: a local layer, a global one and a local one."""
        names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
        sizes = {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 2}
        return super().tiny(**names | sizes | {"query_pre_attn_scalar": 24} | changes)
