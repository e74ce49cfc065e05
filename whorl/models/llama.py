"""Llama: embedding, layers of attention and SwiGLU, each after an RMSNorm and added to the residual, then the head."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from whorl import ops
from whorl.models.checkpoint_tensors import Tensors
from whorl.models.llama_config import LlamaConfig
from whorl.models.one_call import OneCall, plain_form
from whorl.nn import (
    ONE,
    CacheSpec,
    Inserted,
    KVCache,
    Linear,
    Mix,
    Mixer,
    Normed,
    Packed,
    PagedKV,
    Ranks,
    RMSNorm,
    Rope,
    StateSpec,
    Step,
    Vocabulary,
    all_tokens,
    attend,
    check_training,
    scores,
    tempered,
)

# Projections that are separate in a checkpoint and one matrix product here.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@plain_form
class Attention(Mixer):
    """Grouped-query attention of one layer over the paged cache."""

    def __init__(self, config: LlamaConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        heads = ranks.heads(config.num_attention_heads, config.num_key_value_heads)
        q, kv = (slice(part.start * dim, part.stop * dim) for part in heads)
        self.qkv_proj = self.projections(config, q, kv, ranks)
        inner = dim * config.num_attention_heads
        self.o_proj = Linear(inner, width, bias=config.output_bias, shard="row", parts=(q,), ranks=ranks)
        self.layer, self.mixed_size = layer, self.o_proj.shape[1]
        self.num_heads, self.num_kv_heads = ((part.stop - part.start) // dim for part in (q, kv))
        self.rope, self.window = config.rope, config.windows[layer]
        self.scale = dim**-0.5 * config.rope.softmax_scale_correction
        self.head_dim = dim

    def projections(self, config: Any, q: slice, kv: slice, ranks: Ranks) -> Linear:
        """Return the layer that projects to queries, keys and values; q, kv: this rank's rows of each."""
        counts = config.num_attention_heads, *[config.num_key_value_heads] * 2
        return Linear(
            config.hidden_size,
            {name: config.head_dim * n for name, n in zip(MERGED["qkv_proj"], counts, strict=True)},
            bias=config.attention_bias,
            shard="column",
            parts=(q, kv, kv),
            ranks=ranks,
        )

    def cache_spec(self, dtype: torch.dtype) -> PagedKV:
        return PagedKV(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype, window=self.window)

    def flops(self, num_tokens: int) -> float:
        """Return the FLOPs of a prompt: q . k and p v, two for each channel of a head and each key attended to."""
        seen = min(num_tokens, self.window or num_tokens)
        pairs = seen * (seen + 1) / 2 + (num_tokens - seen) * seen
        return 4 * self.num_heads * self.head_dim * pairs

    def heads(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [T, H, D] each; queries and keys are rotated."""
        heads, count = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, -1), self.num_heads
        qk, v = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        # One call for q and k, whose heads are contiguous.
        qk, _ = ops.rope.unchecked(qk, None, rotary, style=self.rope.style, where=self.rope.where)
        return qk[:, :count], qk[:, count:], v

    def rotate(self, qkv: Tensor, rotary: Tensor, step: Step, cache: KVCache) -> Tensor:
        """Return the rotated queries, and write keys and values into the cache."""
        q, k, v = self.heads(qkv, rotary)
        ops.write_kv.unchecked(k, v, cache.k, cache.v, step.slots, cache.k_scale, cache.v_scale)
        return q

    def mix_packed(self, qkv: Tensor, rotary: Tensor, packed: Packed) -> Tensor:
        """Return the output of attention over packed sequences, without a cache and with a gradient."""
        options = {"scale": self.scale, "window": self.window or 0}
        return ops.causal_attention(*self.heads(qkv, rotary), packed.starts, **options)[0].flatten(1)  # type: ignore[no-any-return]

    def mix(self, qkv: Tensor, rotary: Tensor, step: Step, cache: KVCache) -> Tensor:
        """Return the output of attention over the cache, [T, HQ D]: the only part of a layer that mixes tokens."""
        q = self.rotate(qkv, rotary, step, cache)
        return attend(q, step, cache, scale=self.scale, window=self.window).flatten(1)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        return self.o_proj(mix(self, self.qkv_proj(x)))

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        qkv, _, residual = self.qkv_proj.after_norm(norm, x, residual, reads_alone=True)
        (mix,) = arguments
        return self.o_proj(mix(self, qkv)), residual


@plain_form
class MLP(Normed):
    """SwiGLU feed-forward network."""

    def __init__(self, config: LlamaConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        merged = dict.fromkeys(MERGED["gate_up_proj"], inner)
        self.gate_up_proj = Linear(width, merged, bias=config.mlp_bias, shard="column", ranks=ranks)
        self.down_proj = Linear(inner, width, bias=config.mlp_bias, shard="row", ranks=ranks)

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return the activation of gate and up."""
        return ops.glu.unchecked(gate_up)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_up_proj(x)))

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        gate_up, _, residual = self.gate_up_proj.after_norm(norm, x, residual, reads_alone=True)
        return self.down_proj(self.gated(gate_up)), residual


class Layer(Module):
    """A decoder layer: a mixer of tokens and a feed-forward part, each after a norm."""

    def __init__(self, config: Any, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = self.norm(config)
        self.mixer_name = self.name_of_mixer(config, layer)
        self.add_module(self.mixer_name, self.attention(config, layer, ranks))
        self.post_attention_layernorm = self.norm(config)
        self.mlp = self.feed_forward(config, layer, ranks)

    @classmethod
    def norm(cls, config: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    def name_of_mixer(self, config: Any, layer: int) -> str:
        """Return the name that checkpoints have for this layer's mixer."""
        return "self_attn"

    def attention(self, config: Any, layer: int, ranks: Ranks) -> Mixer:
        return Attention(config, layer, ranks)

    @property
    def mixer(self) -> Mixer:
        return self._modules[self.mixer_name]  # type: ignore[return-value]

    def feed_forward(self, config: Any, layer: int, ranks: Ranks) -> Normed:
        return MLP(config, layer, ranks)

    @plain_form
    def forward(self, x: Tensor, residual: Tensor | None, mix: Mix) -> tuple[Tensor, Tensor]:
        """Return the layer's output as two summands, x and the residual, [T, C] each.

        The next norm adds them, because it reads both anyway. The arguments are such a pair, too; the residual is None
        before the first layer. mix: what mixes the tokens.
        """
        x, residual = self.mixer.after_norm(self.input_layernorm, x, residual, mix)
        return self.mlp.after_norm(self.post_attention_layernorm, x, residual)


class Decoder(Module):
    """The embedding, the layers and the final norm."""

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
    """Llama for the engine (`whorl.nn.Model`); other families subclass it.

    config: of `config_class`. dtype: of weights and hidden states. ranks: the tensor-parallel group. max_length: tokens
    of the longest sequence; default: what the model was made for.
    """

    config_class: type[LlamaConfig] = LlamaConfig
    layer_class: type[Layer] = Layer
    # Ends of the names of tensors that some checkpoints have and that are not loaded, because they are computed here.
    ignored = ("rotary_emb.inv_freq",)
    tensors: Tensors | None = None  # of a model whose checkpoints have other names or stacks
    # Why `logprobs` has no gradient, and what to do instead; "": it has one.
    no_gradient: str = ""

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
        """Return the rotary tables; layers get `rows(step)` of them."""
        return Rope(config.rope, max_length)

    def body(self, config: Any, ranks: Ranks) -> Module:
        """Return everything but the head: what a checkpoint has under `model`."""
        return Decoder(config, self.layer_class, ranks)

    @property
    def decoder(self) -> Decoder:
        """The decoder that tokens run through."""
        assert isinstance(self.model, Decoder)
        return self.model

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each layer."""
        return [layer.mixer for layer in self.decoder.layers]  # type: ignore[misc]

    def cache_specs(self) -> list[CacheSpec | StateSpec]:
        return [mixer.cache_spec(self.dtype) for mixer in self.mixers]

    @functools.cached_property
    def one_call(self) -> OneCall:
        """Runs all layers in one call, on a CPU."""
        return OneCall(self)

    def attention_flops(self, num_tokens: int) -> float:
        return sum(mixer.flops(num_tokens) for mixer in self.mixers)

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        if (hidden := self.one_call(step, caches)) is not None:
            return hidden
        parts = [(self.rope.rows(part), part) for part in step.parts()]
        sizes = [len(part.token_ids) for _, part in parts]

        def mix(mixer: Mixer, *projected: Tensor) -> Tensor:
            cache, by_part = caches[mixer.layer], zip(*(x.split(sizes) for x in projected), strict=True)
            outputs = [mixer.mix(*x, *part, cache) for x, part in zip(by_part, parts, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return self.hidden(step.token_ids, mix, step.inserted)

    def logprobs(self, packed: Packed) -> Tensor:
        """Return the log-probability of every token but the first of each sequence, [T - B] fp32, with a gradient.

        They equal, bit for bit, those that the engine returns for the same tokens: docs/arithmetic.md.
        """
        return scores(self.scored_logits(packed), packed)

    def scored_logits(self, packed: Packed, *, temperature: float = 1.0) -> Tensor:
        """Return the logits [T - B, V] that `logprobs` is computed from, divided by the temperature as the engine does
        for `processed_logprobs`. Raises ValueError for a model that has `no_gradient`."""
        if self.no_gradient:
            raise ValueError(f"logprobs: {self.no_gradient}")
        check_training(packed.token_ids.device.type)
        rotary = self.rope.rows(packed)

        def mix(mixer: Mixer, *projected: Tensor) -> Tensor:
            return mixer.mix_packed(*projected, rotary, packed)

        hidden = self.hidden(packed.token_ids, mix, self.inserted(packed))
        return tempered(self.logits(hidden[packed.scored - 1]), temperature)

    def inserted(self, packed: Packed) -> Inserted | None:
        """Return the features of the pictures of packed sequences; ValueError for a model that takes none."""
        if not packed.pictures:
            return None
        tower = getattr(self, "tower", None)
        if tower is None:
            raise ValueError(f"logprobs: {type(self).__name__} takes no pictures; pack the sequences without them")
        return tower.insert(packed, self.config.hidden_size)  # type: ignore[no-any-return]

    @plain_form
    def hidden(self, token_ids: Tensor, mix: Mix, inserted: Inserted | None = None) -> Tensor:
        """Return hidden states [T, C] of token_ids [T], after the final norm.

        Apart from `mix`, every token is computed by itself. inserted: features of images and videos.
        """
        decoder, inserted = self.decoder, None if inserted is None else inserted.own()
        x, residual = self.embed(token_ids), None
        x = x if inserted is None else inserted.embed(x)
        for i, layer in enumerate(decoder.layers):
            x, residual = layer(x, residual, mix)
            x = x if inserted is None else inserted.add(x, i)
        return all_tokens(decoder.norm(x, residual)[0], exact=True)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.decoder.embed_tokens(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.decoder.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.logits(hidden)

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
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
