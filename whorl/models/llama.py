"""Llama: embed, then layers of attention and SwiGLU, each after an RMSNorm and added to the residual, then the head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from whorl import ops
from whorl.models.llama_config import LlamaConfig
from whorl.nn import (
    ONE,
    Inserted,
    KVCache,
    Linear,
    Packed,
    PagedKV,
    Ranks,
    RMSNorm,
    Rope,
    Step,
    Vocabulary,
    attend,
    check_training,
)

# Projections that a checkpoint holds apart and one matrix product computes.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Normed(Module):
    """A part of a layer, and how it is called with the norm before it: one may be computed with its first product."""

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
        """What it gives for norm(x + residual), and that sum."""
        x, residual = norm(x, residual)
        return self(x, *how), residual


class Attention(Normed):
    def __init__(self, config: LlamaConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        sizes = [dim * n for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        heads = ranks.heads(config.num_attention_heads, config.num_key_value_heads)
        q, kv = (slice(part.start * dim, part.stop * dim) for part in heads)
        self.qkv_proj = Linear(
            width,
            dict(zip(MERGED["qkv_proj"], sizes, strict=True)),
            bias=config.attention_bias,
            shard="column",
            parts=(q, kv, kv),
            ranks=ranks,
        )
        self.o_proj = Linear(sizes[0], width, bias=config.output_bias, shard="row", parts=(q,), ranks=ranks)
        self.layer = layer
        self.num_heads, self.num_kv_heads, _ = (size // dim for size in self.qkv_proj.splits)
        self.rope, self.window = config.rope, config.window(layer)
        self.scale = dim**-0.5 * config.rope.softmax_scale_correction
        self.head_dim = dim

    def cache_spec(self, dtype: torch.dtype) -> PagedKV:
        return PagedKV(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype, window=self.window)

    def flops(self, num_tokens: int) -> float:
        """Of a prompt: q . k and p v, two each for a channel of a head and a key that is seen."""
        seen = min(num_tokens, self.window or num_tokens)
        pairs = seen * (seen + 1) / 2 + (num_tokens - seen) * seen
        return 4 * self.num_heads * self.head_dim * pairs

    def heads(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [T, H, D] each, the first two rotated."""
        heads, count = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, -1), self.num_heads
        qk, v = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        # q and k as one: their heads lie side by side.
        qk, _ = ops.rope.unchecked(qk, None, rotary, style=self.rope.style, where=self.rope.where)
        return qk[:, :count], qk[:, count:], v

    def rotate(self, qkv: Tensor, rotary: Tensor, step: Step, cache: KVCache) -> Tensor:
        """The queries, rotated; keys and values are written into the cache."""
        q, k, v = self.heads(qkv, rotary)
        ops.write_kv.unchecked(k, v, cache.k, cache.v, step.slots, cache.k_scale, cache.v_scale)
        return q

    def mix_packed(self, qkv: Tensor, rotary: Tensor, packed: Packed) -> Tensor:
        """The same without a cache, with a gradient: whole sequences."""
        how = {"scale": self.scale, "window": self.window or 0}
        return ops.causal_attention(*self.heads(qkv, rotary), packed.starts, **how)[0].flatten(1)  # type: ignore[no-any-return]

    def mix(self, qkv: Tensor, rotary: Tensor, step: Step, cache: KVCache) -> Tensor:
        """What tokens see of each other, [T, HQ D]: all that needs more than the rows themselves."""
        q = self.rotate(qkv, rotary, step, cache)
        return attend(q, step, cache, scale=self.scale, window=self.window).flatten(1)

    def forward(self, x: Tensor, mix: "Mix") -> Tensor:
        return self.o_proj(mix(self, self.qkv_proj(x)))

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
        qkv, _, residual = self.qkv_proj.after(norm, x, residual)
        (mix,) = how
        return self.o_proj(mix(self, qkv)), residual


Mix = Callable[[Attention, Tensor], Tensor]  # of a layer's qkv


class MLP(Normed):
    def __init__(self, config: LlamaConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        merged = dict.fromkeys(MERGED["gate_up_proj"], inner)
        self.gate_up_proj = Linear(width, merged, bias=config.mlp_bias, shard="column", ranks=ranks)
        self.down_proj = Linear(inner, width, bias=config.mlp_bias, shard="row", ranks=ranks)

    def gated(self, gate_up: Tensor) -> Tensor:
        return ops.swiglu.unchecked(gate_up)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_up_proj(x)))

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
        gate_up, _, residual = self.gate_up_proj.after(norm, x, residual)
        return self.down_proj(self.gated(gate_up)), residual


class Layer(Module):
    def __init__(self, config: Any, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = self.norm(config)
        self.self_attn = self.attention(config, layer, ranks)
        self.post_attention_layernorm = self.norm(config)
        self.mlp = self.feed_forward(config, layer, ranks)

    @classmethod
    def norm(cls, config: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attention(self, config: Any, layer: int, ranks: Ranks) -> Attention:
        return Attention(config, layer, ranks)

    def feed_forward(self, config: Any, layer: int, ranks: Ranks) -> Normed:
        return MLP(config, layer, ranks)

    def forward(self, x: Tensor, residual: Tensor | None, mix: Mix) -> tuple[Tensor, Tensor]:
        """The residual travels beside x and is added by the next norm, which reads both anyway."""
        x, residual = self.self_attn.after(self.input_layernorm, x, residual, mix)
        return self.mlp.after(self.post_attention_layernorm, x, residual)


class Decoder(Module):
    def __init__(self, config: LlamaConfig, layer_class: type[Layer], ranks: Ranks) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(
            config.vocab_size,
            config.hidden_size,
            is_embedding=True,
            is_head=config.tie_word_embeddings,
            ranks=ranks,
        )
        self.layers = ModuleList(layer_class(config, i, ranks) for i in range(config.num_hidden_layers))
        self.norm = layer_class.norm(config)


class Llama(Module):
    config_class: type[LlamaConfig] = LlamaConfig
    layer_class: type[Layer] = Layer
    # In some checkpoints, and computed here.
    ignored = ("rotary_emb.inv_freq",)

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ONE,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.vocab_size = config, dtype, config.vocab_size
        self.rope = self.tables(config, max_length)
        self.max_length = self.rope.max_length
        self.model = self.body(config, ranks)
        if not config.tie_word_embeddings:
            self.lm_head = Vocabulary(config.vocab_size, config.hidden_size, is_head=True, ranks=ranks)

    def tables(self, config: Any, max_length: int | None) -> Any:
        """What layers turn by: `rows(step)` is handed to each of them."""
        return Rope(config.rope, max_length)

    def body(self, config: Any, ranks: Ranks) -> Module:
        """All but the head: what a checkpoint has under `model`."""
        return Decoder(config, self.layer_class, ranks)

    @property
    def decoder(self) -> Decoder:
        """What tokens run through."""
        assert isinstance(self.model, Decoder)
        return self.model

    def cache_specs(self) -> list[PagedKV]:
        return [layer.self_attn.cache_spec(self.dtype) for layer in self.decoder.layers]  # type: ignore[union-attr,operator]

    def attention_flops(self, num_tokens: int) -> float:
        return sum(layer.self_attn.flops(num_tokens) for layer in self.decoder.layers)  # type: ignore[union-attr,operator]

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        rotary = self.rope.rows(step)

        def mix(attention: Attention, qkv: Tensor) -> Tensor:
            return attention.mix(qkv, rotary, step, caches[attention.layer])

        return self.hidden(step.token_ids, mix, step.inserted)

    def logprobs(self, packed: Packed) -> Tensor:
        """Of every token but the first of a sequence, given those before it: [T - B] fp32, with a gradient.

        What the engine tells of the same tokens, bit for bit: docs/arithmetic.md.
        """
        check_training(packed.token_ids.device.type)
        rotary = self.rope.rows(packed)

        def mix(attention: Attention, qkv: Tensor) -> Tensor:
            return attention.mix_packed(qkv, rotary, packed)

        hidden = self.hidden(packed.token_ids, mix)
        logits = self.logits(hidden[packed.scored - 1])
        return ops.token_logprobs(logits, packed.token_ids[packed.scored])  # type: ignore[no-any-return]

    def hidden(self, token_ids: Tensor, mix: Mix, inserted: Inserted | None = None) -> Tensor:
        """Everything but what `mix` does: of token_ids [T] it looks at one row at a time."""
        decoder = self.decoder
        x, residual = self.embed(token_ids), None
        x = x if inserted is None else inserted.embed(x)
        for i, layer in enumerate(decoder.layers):
            x, residual = layer(x, residual, mix)
            x = x if inserted is None else inserted.add(x, i)
        return decoder.norm(x, residual)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.decoder.embed_tokens(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.decoder.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.logits(hidden)

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """A config.json small enough for tests."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            **changes,
        }
