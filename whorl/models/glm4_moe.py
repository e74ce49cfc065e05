"""GLM-4.5, GLM-4.6 and GLM-4.7, mixtures of experts: grouped-query attention that rotates half a head, and DeepSeek's
experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whorl.models import deepseek, llama, qwen3
from whorl.models.deepseek_mtp import Prediction
from whorl.models.fields import count, flag, number
from whorl.models.llama_config import BIASES, LlamaConfig
from whorl.nn import ONE, Normed, Ranks

_COUNTS = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4MoeConfig(LlamaConfig):
    """config.json of GLM-4.5: Llama's fields, and those of DeepSeek's experts by their own names.

    qk_norm: heads of queries and keys are normed, as in the large models. bias_default: attention_bias where the file
    does not say.
    """

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    n_shared_experts: int
    first_k_dense_replace: int
    num_nextn_predict_layers: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    qk_norm: bool

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        is_seeing = str(values.get("model_type")).startswith("glm4v_moe")
        values = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": is_seeing, **values}
        counts = {name: count(values, name, default) for name, default in _COUNTS.items()}
        _check_experts(counts)
        fields = LlamaConfig.read(values)
        biases = dict.fromkeys(BIASES, False) | {"attention_bias": flag(values, "attention_bias")}
        return {
            **fields,
            **biases,
            **counts,
            "n_shared_experts": count(values, "n_shared_experts", 1, least=0),
            "first_k_dense_replace": count(values, "first_k_dense_replace", 1, least=0),
            "num_nextn_predict_layers": 0 if is_seeing else count(values, "num_nextn_predict_layers", 0, least=0),
            "norm_topk_prob": flag(values, "norm_topk_prob", True),
            "routed_scaling_factor": number(values, "routed_scaling_factor", 1.0),
            "qk_norm": flag(values, "use_qk_norm"),
        }


def _check_experts(counts: Mapping[str, int]) -> None:
    experts, groups, top, per_token = (
        counts[name] for name in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    )
    if experts % groups or top > groups or per_token > experts * top // groups:
        raise ValueError(
            f"config.json: n_routed_experts is {experts}, n_group {groups}, topk_group {top}, num_experts_per_tok "
            f"{per_token}; expected groups of equal size, a topk_group of at most n_group, and in those groups as "
            "many experts as a token takes"
        )


class Layer(llama.Layer):
    """A decoder layer: dense in the first layers, with experts after them."""

    def attention(self, config: Any, layer: int, ranks: Ranks) -> qwen3.Attention:
        return qwen3.Attention(config, layer, ranks)

    def feed_forward(self, config: Any, layer: int, ranks: Ranks) -> Normed:
        if layer < config.first_k_dense_replace:
            return llama.MLP(config, layer, ranks)
        return deepseek.MoE(config, ranks)


class Glm4Moe(llama.Llama):
    """GLM-4.5 and its successors for the engine."""

    config_class: type[Glm4MoeConfig] = Glm4MoeConfig
    layer_class = Layer

    def __init__(self, config: Glm4MoeConfig, *, ranks: Ranks = ONE, **options: Any) -> None:
        super().__init__(config, ranks=ranks, **options)
        self.ranks = ranks
        # Multi-token prediction layers are numbered after the others; `Prediction` loads the first of them.
        first = config.num_hidden_layers
        self.ignored_layers = tuple(f"model.layers.{first + i}." for i in range(config.num_nextn_predict_layers))

    def prediction(self) -> Prediction:
        """Return the multi-token prediction layer, without weights; raises ValueError if the model has none."""
        if not self.ignored_layers:
            raise ValueError("the model has no layer of multi-token prediction: num_nextn_predict_layers is 0")
        return Prediction(self, self.ranks)

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        return super().tiny(
            **{
                "architectures": ["Glm4MoeForCausalLM"],
                "model_type": "glm4_moe",
                "head_dim": 16,
                "num_hidden_layers": 3,
                "attention_bias": True,
                "partial_rotary_factor": 0.5,
                "moe_intermediate_size": 16,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 0,
                "routed_scaling_factor": 2.5,
                "use_qk_norm": True,
                **changes,
            }
        )
