"""Qwen3-Next: gated delta layers and, in every fourth layer, attention with a gate; a shared expert beside the others.

Qwen3.5's text models are the same with other names of tensors: `qwen3_5.py`.
"""

from typing import Any

from torch import Tensor

from whorl import ops
from whorl.models import llama, qwen3
from whorl.models.checkpoint_tensors import separated
from whorl.models.deepseek import MLP
from whorl.models.gated_delta import GatedDelta, GatedDeltaByHead, shifted
from whorl.models.qwen3_next_config import LINEAR, Qwen3NextConfig
from whorl.models.qwen3_next_mtp import Prediction
from whorl.nn import ONE, Linear, Mix, Mixer, Ranks, RMSNorm, own_tokens


class Attention(qwen3.Attention):
    """Qwen3's attention with norms of 1 + weight, whose output is multiplied by the sigmoid of a gate."""

    plus_one = True

    def projections(self, config: Any, q: slice, kv: slice, ranks: Ranks) -> Linear:
        """Return the layer that projects to queries, keys, values and the gate of queries.

        q_proj has the rows of each head's query, then those of its gate.
        """
        dim = config.head_dim
        heads = [slice(2 * first, 2 * first + dim) for first in range(q.start, q.stop, dim)]
        pieces = [("q_proj", head) for head in heads] + [("k_proj", kv), ("v_proj", kv)]
        pieces += [("q_proj", shifted(head, dim)) for head in heads]
        counts = {"q_proj": 2 * config.num_attention_heads}
        counts |= dict.fromkeys(("k_proj", "v_proj"), config.num_key_value_heads)
        outputs = {name: dim * count for name, count in counts.items()}
        options: dict[str, Any] = {"bias": config.attention_bias, "shard": "column", "ranks": ranks}
        return Linear(config.hidden_size, outputs, pieces=pieces, **options)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        return self._gated(self.qkv_proj(x), mix)

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        projected, _, residual = self.qkv_proj.after_norm(norm, x, residual, reads_alone=True)
        return self._gated(projected, *arguments), residual

    def _gated(self, projected: Tensor, mix: Mix) -> Tensor:
        qkv, gate = projected[:, : -self.mixed_size], projected[:, -self.mixed_size :]
        return self.o_proj(ops.output_gate.unchecked(mix(self, qkv), gate))


class MoE(qwen3.MoE):
    """Qwen3's experts, and one that every token uses, multiplied by the sigmoid of its own gate.

    `gate` has the router's rows, then that of the shared expert's gate.
    """

    def __init__(self, config: Any, experts: qwen3.ExpertsConfig, ranks: Ranks) -> None:
        super().__init__(config, experts, ranks)
        self.gate = Linear(config.hidden_size, {"gate": experts.num_experts, "shared_expert_gate": 1})
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_size, ranks)

    def _route(self, x: Tensor, logits: Tensor) -> Tensor:
        routed = super()._route(x, logits[:, :-1])
        return ops.gated_add.unchecked(routed, self.shared_expert(x), own_tokens(logits)[:, -1])  # type: ignore[no-any-return]


class Layer(qwen3.Layer):
    """A decoder layer with attention or a recurrence."""

    moe_class: type[qwen3.MoE] = MoE

    @classmethod
    def norm(cls, config: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)

    def name_of_mixer(self, config: Any, layer: int) -> str:
        return "linear_attn" if config.kinds[layer] == LINEAR else "self_attn"

    def attention(self, config: Any, layer: int, ranks: Ranks) -> Mixer:  # type: ignore[override]
        if self.mixer_name == "linear_attn":
            return (GatedDeltaByHead if config.projections_by_head else GatedDelta)(config, layer, ranks)
        return Attention(config, layer, ranks)


class Qwen3Next(qwen3.Qwen3):
    """Qwen3-Next for the engine."""

    config_class: type[Qwen3NextConfig] = Qwen3NextConfig
    layer_class: type[Layer] = Layer
    tensors = staticmethod(separated)

    def __init__(self, config: Any, *, ranks: Ranks = ONE, **options: Any) -> None:
        super().__init__(config, ranks=ranks, **options)
        self.ranks, self.num_predictions = ranks, config.num_nextn_predict_layers
        self.ignored_layers = (
            "mtp.layers.0.",
            "mtp.",
        )  # layers of multi-token prediction: `Prediction` loads the first of them

    def prediction(self) -> Prediction:
        """Return the multi-token prediction layer, without weights; raises ValueError if the model has none."""
        if not self.num_predictions:
            raise ValueError("the model has no layer of multi-token prediction: mtp_num_hidden_layers is 0")
        return Prediction(self, self.ranks)

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        names = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
        return llama.Llama.tiny(**{**names, **tiny_sizes(), **TINY_EXPERTS, **changes})


TINY_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TINY_EXPERTS |= {"shared_expert_intermediate_size": 40}


def tiny_sizes() -> dict[str, Any]:
    """Return sizes for tests: two layers of each kind, two key heads for four value heads, a quarter rotated."""
    return {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 10,
        "mtp_num_hidden_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
