"""GLM-4.7-Flash: DeepSeek-V3 by another name, with one group of experts."""

from collections.abc import Mapping
from typing import Any

from whorl.models import deepseek

# The defaults of Hugging Face's class, for what published files leave out.
_DEFAULTS = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
}


def dense_layers(values: Mapping[str, Any], default: int) -> Any:
    """Return how many layers have no experts, which a file may say by the kinds of layers instead.

    default: that of Hugging Face's class.
    """
    kinds, dense = values.get("mlp_layer_types"), values.get("first_k_dense_replace")
    if dense is None:
        return kinds.index("sparse") if isinstance(kinds, list) and "sparse" in kinds else default
    return dense


class Glm4MoeLiteConfig(deepseek.DeepSeekConfig):
    """config.json of GLM-4.7-Flash, read as DeepSeek-V3's."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Glm4MoeLiteConfig":
        dense = dense_layers(values, 1)
        partial = values.get("partial_rotary_factor")  # of the channels that rotate, all of them do
        if partial not in (None, 1):
            raise ValueError(f"config.json: partial_rotary_factor is {partial!r}, expected 1")
        read = {**_DEFAULTS, **values, "first_k_dense_replace": dense, "model_type": "deepseek_v3"}
        return super().from_hf(read)  # type: ignore[return-value]

    @property
    def low_rank_eps(self) -> float:
        return 1e-6  # as in Hugging Face's class, whatever the file says for the other norms


class Glm4MoeLite(deepseek.DeepSeek):
    """GLM-4.7-Flash for the engine."""

    config_class = Glm4MoeLiteConfig
    no_gradient = "GLM-4.7-Flash has no gradient here; take another model to train"

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        config = super().tiny(model_type="deepseek_v3", n_group=1, topk_group=1, rms_norm_eps=1e-5)
        config |= {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
        return {name: value for name, value in config.items() if not name.startswith("index_")} | changes
