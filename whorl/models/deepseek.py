"""DeepSeek-V3, -V3.1, -V3.2, Kimi-K2: latent attention (MLA), in V3.2 over selected keys, and experts in groups.

Attention is always absorbed: a cached token is one latent and the rotated key channels, which all heads share. The
config, the tensor names and the names in training are in `deepseek_v32.py`, without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from whorl import ops
from whorl.models import llama
from whorl.models.deepseek_mtp import Prediction
from whorl.models.deepseek_v32 import NAMES, DeepSeekV32Config, flat
from whorl.nn import (
    ONE,
    Experts,
    LatentCache,
    LatentHeads,
    LatentKV,
    LayerNorm,
    Linear,
    Mix,
    Mixer,
    Normed,
    Ranks,
    RMSNorm,
    Router,
    Step,
    all_tokens,
)

INDEX_EPS = 1e-6  # epsilon of the norm of the indexer's keys


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(DeepSeekV32Config):
    """config.json of DeepSeek; has_indexer: True for V3.2. V3 and V3.1 have none and attend to every key."""

    has_indexer: bool = True
    tie_word_embeddings: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DeepSeekConfig":
        if values.get("model_type") == "kimi_k2":  # Kimi-K2 is DeepSeek-V3 with other sizes
            values = {**values, "model_type": "deepseek_v3"}
        sizes = DeepSeekV32Config.from_hf(values)
        config = cls(**asdict(sizes), has_indexer=values["model_type"] == "deepseek_v32")
        if config.n_routed_experts % config.n_group or not config.topk_group <= config.n_group:
            raise ValueError(
                f"config.json: n_routed_experts is {config.n_routed_experts}, n_group {config.n_group}, topk_group "
                f"{config.topk_group}; expected groups of equal size and a topk_group of at most n_group"
            )
        return config

    def selects(self, layer: int) -> bool:
        """Return whether this layer has an indexer of its own."""
        return self.has_indexer

    @property
    def experts(self) -> int:
        return self.n_routed_experts

    @property
    def low_rank_eps(self) -> float:
        """The epsilon of the norms inside attention."""
        return self.rms_norm_eps


class Indexer(Module):
    """V3.2's lightning indexer, which selects the `topk` keys that a token attends to. Every rank has all of it."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.num_heads * self.head_dim)
        self.wk = Linear(config.hidden_size, self.head_dim)
        self.k_norm = LayerNorm(self.head_dim, INDEX_EPS)
        self.weights_proj = Linear(config.hidden_size, self.num_heads)
        self.style = config.index_rope.style

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The channels of the three tensors that `project` returns: queries, key and weights of heads."""
        return self.num_heads * self.head_dim, self.head_dim, self.num_heads

    def project(self, x: Tensor, q_low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this for all tokens; x and q_low are as in `Attention.forward`."""
        return self.wq_b(q_low), all_tokens(self.wk(x)), all_tokens(self.weights_proj(x))

    def choose(self, projected: tuple[Tensor, ...], rotary: Tensor, step: Step, cache: Tensor) -> Tensor | None:
        """Write the keys into the cache and return the positions of the selected keys, [T, topk].

        projected: what `project` returned. None is returned where every token sees so few keys that all are selected.
        """
        q, k, weights = projected
        ops.index_write.unchecked(
            k,
            self.k_norm.weight,
            self.k_norm.bias,
            rotary,
            cache,
            step.slots,
            eps=self.k_norm.eps,
            style=self.style,
        )
        if step.max_position <= self.topk:
            return None
        q, _ = ops.rope.unchecked(q.unflatten(1, (self.num_heads, self.head_dim)), None, rotary, style=self.style)
        head_weights = weights.float() * (self.num_heads * self.head_dim) ** -0.5
        lengths = (step.block_tables, step.query_starts, step.context_lens)
        return ops.paged_indexer.unchecked(q, head_weights, cache, *lengths, self.topk)  # type: ignore[no-any-return]

    def flops(self, num_tokens: int) -> float:
        return self.num_heads * self.head_dim * num_tokens * (num_tokens + 1)


class Attention(Mixer):
    """Latent attention of one layer."""

    def __init__(self, config: DeepSeekConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.rope, self.scale = layer, config.rope, config.softmax_scale
        self.rank, self.turning, self.nope = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
        self.head_dim = self.nope + self.turning
        width, count, value = config.hidden_size, config.num_attention_heads, config.v_head_dim
        rank_heads = ranks.share("attention heads", count)
        self.num_heads = rank_heads.stop - rank_heads.start

        def head_range(channels: int) -> tuple[slice]:
            return (slice(rank_heads.start * channels, rank_heads.stop * channels),)

        shared = {"q_a_proj": config.q_lora_rank, "kv_a_proj_with_mqa": self.rank + self.turning}
        self.qkv_a_proj = Linear(width, shared)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.low_rank_eps)
        self.q_b_proj = Linear(
            config.q_lora_rank, count * self.head_dim, shard="column", parts=head_range(self.head_dim), ranks=ranks
        )
        self.kv_a_layernorm = RMSNorm(self.rank, config.low_rank_eps)
        heads = {"count": count, "nope": self.nope, "value": value}
        self.kv_b_proj = LatentHeads(heads, self.rank, rank_heads=rank_heads, ranks=ranks)
        self.o_proj = Linear(count * value, width, shard="row", parts=head_range(value), ranks=ranks)
        self.mixed_size = self.o_proj.shape[1]
        self.indexer = Indexer(config) if config.selects(layer) else None
        self.topk = config.index_topk if config.has_indexer else 0

    def cache_spec(self, dtype: torch.dtype) -> LatentKV:
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return LatentKV(latent_dim=self.rank, rotary_dim=self.turning, dtype=dtype, index_dim=index_dim, topk=self.topk)

    def flops(self, num_tokens: int) -> float:
        """Return the FLOPs of a prompt.

        They are those of q . k over latent and rotated channels, p v over the latent, and all scores of the indexer.
        """
        seen = min(num_tokens, self.topk or num_tokens)
        pairs = seen * (seen + 1) / 2 + (num_tokens - seen) * seen
        scores = 0 if self.indexer is None else self.indexer.flops(num_tokens)
        return 2 * self.num_heads * (2 * self.rank + self.turning) * pairs + scores

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, residual = norm(x, residual)
        return self(x, *arguments), residual  # not of all tokens: what is gathered is narrower after the projections

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        q_low, kv = all_tokens(self.qkv_a_proj(x)).split(self.qkv_a_proj.splits, -1)
        q_low = self.q_a_layernorm(q_low, None)[0]
        index = () if self.indexer is None else self.indexer.project(x, q_low)
        # Joined to one tensor, because a mix takes one.
        return self.o_proj(mix(self, torch.cat((self.q_b_proj(q_low), kv, *index), -1)))

    def mix(self, projected: Tensor, rotary: Tensor, step: Step, cache: LatentCache) -> Tensor:
        """Return the output of attention, [T, H Dv], and write latents and the indexer's keys into the cache."""
        sizes = self.num_heads * self.head_dim, self.rank + self.turning
        q, kv, *index = projected.split((*sizes, *(() if self.indexer is None else self.indexer.sizes)), -1)
        norm = self.kv_a_layernorm
        ops.latent_write.unchecked(kv, norm.weight, rotary, cache.latent, step.slots, cache.rotary, eps=norm.eps)
        selected = self.selected(tuple(index), rotary, step, cache)
        latents = ops.latent_attention.unchecked(
            self.absorbed(q, rotary),
            cache.latent,
            step.block_tables,
            step.query_starts,
            step.context_lens,
            selected,
            cache.rotary,
            scale=self.scale,
            value_dim=self.rank,
        )
        return self.kv_b_proj.values(latents).flatten(1)

    def selected(self, index: tuple[Tensor, ...], rotary: Tensor, step: Step, cache: LatentCache) -> Tensor | None:
        """Return the positions of the keys that tokens attend to, [T, topk]; None: all. index: of `Indexer.project`."""
        if self.indexer is None:
            return None
        assert cache.index is not None
        return self.indexer.choose(index, rotary, step, cache.index)

    def absorbed(self, q: Tensor, rotary: Tensor) -> Tensor:
        """Return queries [T, H, Dc + R]: absorbed into the latent space, then the rotated channels."""
        heads = q.unflatten(1, (self.num_heads, self.head_dim))
        rotated, _ = ops.rope.unchecked(heads[..., self.nope :], None, rotary, style=self.rope.style)
        return torch.cat((self.kv_b_proj.absorb(heads[..., : self.nope]), rotated), -1)


class MLP(Normed):
    """Llama's feed-forward part with any inner size."""

    def __init__(self, width: int, inner: int, ranks: Ranks) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            width, dict.fromkeys(llama.MERGED["gate_up_proj"], inner), shard="column", ranks=ranks
        )
        self.down_proj = Linear(inner, width, shard="row", ranks=ranks)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.glu.unchecked(self.gate_up_proj(x)))


class MoE(Normed):
    """Routed experts and shared ones.

    Scores are sigmoids; a bias takes part in the choice only. A token's experts come from its best groups of experts.
    """

    def __init__(self, config: DeepSeekConfig, ranks: Ranks) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(width, config.n_routed_experts)
        self.k = config.num_experts_per_tok
        self.routing: dict[str, Any] = {
            "scoring": "sigmoid",
            "renormalize": config.norm_topk_prob,
            "num_groups": config.n_group,
            "top_groups": config.topk_group,
            "scale": config.routed_scaling_factor,
        }
        self.experts = Experts(config.n_routed_experts, width, inner, per_token=self.k, ranks=ranks)
        self.shared_experts = MLP(width, config.n_shared_experts * inner, ranks) if config.n_shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        # The bias chooses and is in no weight, so it has no gradient: trainers balance experts by it.
        weights, ids = ops.route(self.gate(x), self.k, self.gate.bias.detach(), **self.routing)
        y: Tensor = self.experts(x, weights, ids)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Layer(llama.Layer):
    """A decoder layer: dense in the first layers, with experts after them."""

    def attention(self, config: DeepSeekConfig, layer: int, ranks: Ranks) -> Attention:  # type: ignore[override]
        return Attention(config, layer, ranks)

    def feed_forward(self, config: DeepSeekConfig, layer: int, ranks: Ranks) -> Normed:
        if layer < config.first_k_dense_replace:
            return MLP(config.hidden_size, config.intermediate_size, ranks)
        return MoE(config, ranks)


class DeepSeek(llama.Llama):
    """DeepSeek-V3, -V3.1 and -V3.2 for the engine."""

    config_class = DeepSeekConfig  # type: ignore[assignment]
    layer_class = Layer
    no_gradient = "DeepSeek has no gradient here; train it with `whorl train` and serve the checkpoint"

    def __init__(self, config: DeepSeekConfig, *, ranks: Ranks = ONE, **options: Any) -> None:
        super().__init__(config, ranks=ranks, **options)  # type: ignore[arg-type]
        first, self.ranks = config.num_hidden_layers, ranks
        # The scales of the FP8 weights that DeepSeek publishes.
        self.block_scales = "ue8m0" if config.has_indexer else "float"
        # Multi-token prediction layers are numbered after the others; `Prediction` loads the first of them.
        self.ignored_layers = tuple(f"model.layers.{first + i}." for i in range(config.num_nextn_predict_layers))

    def prediction(self) -> Prediction:
        """Return the multi-token prediction layer, without weights; raises ValueError if the model has none."""
        if not self.ignored_layers:
            raise ValueError("the model has no layer of multi-token prediction: num_nextn_predict_layers is 0")
        return Prediction(self, self.ranks)

    @staticmethod
    def trained_names(values: Mapping[str, Any]) -> tuple[Mapping[str, str], Callable[[str], str]]:
        """Return the names of tensors in checkpoints of `whorl train`, and a function from a tensor's name in a file to
        one of them; values: of a config.json."""
        return NAMES, lambda name: flat(name, values["num_hidden_layers"])

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests; model_type "deepseek_v3" makes a model without an indexer."""
        name = {"deepseek_v3": "DeepseekV3ForCausalLM"}.get(changes.get("model_type", ""), "DeepseekV32ForCausalLM")
        sizes = {
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "index_n_heads": 24,
            "index_head_dim": 16,
            "index_topk": 16,
            "routed_scaling_factor": 2.5,
        }
        return super().tiny(**{"architectures": [name], "model_type": "deepseek_v32", **sizes, **changes})
