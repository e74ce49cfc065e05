"""Qwen3, dense and mixture of experts: Llama with an RMSNorm of every query and key head, and sliding windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whorl import ops
from whorl.models import llama
from whorl.models.fields import count, flag
from whorl.models.llama_config import LlamaConfig, layer_windows
from whorl.models.one_call import plain_form
from whorl.nn import Experts, KVCache, Linear, Normed, Ranks, RMSNorm, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """The fields of config.json about experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]  # layers that have experts; the others are dense


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config(LlamaConfig):
    """config.json of Qwen3; `experts` is None for the dense model.

    Every Qwen3 has qk_norm; without it this is Llama, or Llama with experts.
    """

    experts: ExpertsConfig | None = None
    qk_norm: bool = True

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        is_sparse = values.get("model_type") in ("qwen3_moe", "qwen3_vl_moe")
        if not is_sparse:
            values = {"head_dim": 128, **values}  # the default of Hugging Face's dense class; its sparse one has none
        experts = experts_of(values) if is_sparse else None
        # As in transformers, whose sparse class applies the window to all layers.
        windows = layer_windows(values, first=0, named=False) if is_sparse else layer_windows(values)
        return LlamaConfig.read(values) | {"windows": windows, "experts": experts}


def experts_of(values: Mapping[str, Any]) -> ExpertsConfig:
    """Read the fields about experts."""
    name = "num_local_experts" if values.get("num_experts") is None else "num_experts"
    dense_layers = values.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(isinstance(layer, int) for layer in dense_layers):
        raise ValueError(f"config.json: mlp_only_layers is {dense_layers!r}, expected a list of layer numbers")
    step, layers = count(values, "decoder_sparse_step", 1), range(count(values, "num_hidden_layers"))
    num_experts, per_token = count(values, name), count(values, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {per_token}, expected at most the number of experts, {num_experts}"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=count(values, "moe_intermediate_size"),
        norm_topk_prob=flag(values, "norm_topk_prob"),
        layers=tuple(i for i in layers if i not in dense_layers and (i + 1) % step == 0),
    )


@plain_form
class Attention(llama.Attention):
    """Llama's attention with an RMSNorm of every query and key head."""

    plus_one = False  # whether norms multiply by 1 + weight

    def __init__(self, config: Qwen3Config, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        self.is_normed, self.eps = config.qk_norm, config.rms_norm_eps
        if self.is_normed:
            self.q_norm = RMSNorm(config.head_dim, self.eps, plus_one=self.plus_one)
            self.k_norm = RMSNorm(config.head_dim, self.eps, plus_one=self.plus_one)

    def heads(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.is_normed:
            return super().heads(qkv, rotary)
        return ops.qk_norm_rope(  # type: ignore[no-any-return]
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            rotary,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            eps=self.eps,
            plus_one=self.plus_one,
            style=self.rope.style,
        )

    def rotate(self, qkv: Tensor, rotary: Tensor, step: Step, cache: KVCache) -> Tensor:
        if not self.is_normed:
            return super().rotate(qkv, rotary, step, cache)
        q = qkv.new_empty(qkv.shape[0], self.num_heads, self.head_dim)
        ops.qk_norm_rope_write(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            rotary,
            q,
            cache.k,
            cache.v,
            step.slots,
            cache.k_scale,
            cache.v_scale,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            eps=self.eps,
            plus_one=self.plus_one,
            style=self.rope.style,
        )
        return q


@plain_form
class MoE(Normed):
    """Routes each token to the experts with the highest scores and adds their outputs, weighted by the scores."""

    experts_class: type[Experts] = Experts

    def __init__(self, config: Qwen3Config, experts: ExpertsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, experts.num_experts)
        self.k, self.renormalize = experts.num_experts_per_tok, experts.norm_topk_prob
        sizes = experts.num_experts, config.hidden_size, experts.moe_intermediate_size
        self.experts = self.experts_class(*sizes, per_token=self.k, ranks=ranks)

    def forward(self, x: Tensor) -> Tensor:
        return self._route(x, self.gate(x))

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        logits, x, residual = self.gate.after_norm(norm, x, residual)
        return self._route(x, logits), residual

    def _route(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = ops.route(logits, self.k, renormalize=self.renormalize)
        return self.experts(x, weights, ids)


class Layer(llama.Layer):
    """A decoder layer, dense or with experts."""

    moe_class: type[MoE] = MoE

    def attention(self, config: Qwen3Config, layer: int, ranks: Ranks) -> Attention:
        return Attention(config, layer, ranks)

    def feed_forward(self, config: Qwen3Config, layer: int, ranks: Ranks) -> Normed:
        if config.experts is not None and layer in config.experts.layers:
            return self.moe_class(config, config.experts, ranks)
        return llama.MLP(config, layer, ranks)


class Qwen3(llama.Llama):
    """Qwen3, dense or with experts."""

    config_class: type[Qwen3Config] = Qwen3Config
    layer_class = Layer

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a dense config.json small enough for tests; `num_experts` makes it sparse."""
        names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
        if changes.get("num_experts"):
            names |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
            changes = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, **changes}
        return super().tiny(**names, **changes)
