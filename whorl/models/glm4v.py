"""GLM-4.1V, GLM-4.5V and GLM-4.6V: text models with the features of images and videos in place of placeholder tokens.

The small models have a dense text model with norms around each part, which rotates neighbouring channels. The large
ones have GLM-4.5-Air, which rotates halves. The features come from the tower in glm4v_tower.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from whorl.models import glm4_moe, llama
from whorl.models.fields import count, flag, section
from whorl.models.glm4v_tower import Tower, TowerConfig
from whorl.models.llama_config import BIASES, LlamaConfig
from whorl.models.vision_tower_config import check_width
from whorl.nn import Linear, Mix, Normed, Part, Ranks, RMSNorm
from whorl.positions import PositionRule

# ---- configurations

_TOKEN_IDS = {"image_token_id": 151343, "video_start_token_id": 151341, "video_end_token_id": 151342}
_TOKEN_IDS_46 = _TOKEN_IDS | {"video_start_token_id": 151361, "video_end_token_id": 151362}
_TOKEN_IDS_MOE = _TOKEN_IDS | {"image_token_id": 151363}


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4vTextConfig(LlamaConfig):
    """text_config of GLM-4.1V."""

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        biases = dict.fromkeys(BIASES, False) | {"attention_bias": True}
        return LlamaConfig.read({"num_key_value_heads": 2, "rms_norm_eps": 1e-5, **values}) | biases


def _seeing(values: Mapping[str, Any], text: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a text model's config together with those of the tower and of placeholders."""
    tower = TowerConfig.from_hf(section(values, "vision_config"))
    check_width(tower, text)
    ids = {name: count(values, name, default) for name, default in ids.items()}
    rule = {"model_type": "glm4v", "vision_config": {"spatial_merge_size": tower.spatial_merge_size}, **ids}
    return {
        **text,
        "tie_word_embeddings": flag(values, "tie_word_embeddings"),
        "vision": tower,
        "position_rule": PositionRule.from_hf(rule),
        "image_token_id": ids["image_token_id"],
        # The frames of a video have the placeholders of images; the tokens around them tell them apart.
        "video_token_id": ids["image_token_id"],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4vConfig(Glm4vTextConfig):
    """config.json of GLM-4.1V and GLM-4.6V-Flash: the fields of the text model, and `vision`, the tower's."""

    vision: TowerConfig
    position_rule: PositionRule
    image_token_id: int
    video_token_id: int

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        text = section(values, "text_config")
        if (kind := text.get("model_type") or "glm4v_text") != "glm4v_text":
            raise ValueError(f"config.json: text_config.model_type is {kind!r}, expected glm4v_text")
        ids = _TOKEN_IDS_46 if values.get("model_type") == "glm46v" else _TOKEN_IDS
        return _seeing(values, Glm4vTextConfig.read({**text, "model_type": "glm4v_text"}), ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4vMoeConfig(glm4_moe.Glm4MoeConfig):
    """config.json of GLM-4.5V and GLM-4.6V: the fields of the text model, and `vision`, the tower's."""

    vision: TowerConfig
    position_rule: PositionRule
    image_token_id: int
    video_token_id: int

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        text = {**section(values, "text_config"), "model_type": "glm4v_moe_text"}
        return _seeing(values, glm4_moe.Glm4MoeConfig.read(text), _TOKEN_IDS_MOE)


# ---- the dense text model


class FusedLinear(Linear):
    """Gate and up projections that a checkpoint has as one tensor, gate above up; ranks take their rows of both."""

    def __init__(self, inputs: int, inner: int, *, ranks: Ranks) -> None:
        super().__init__(inputs, {"gate": inner, "up": inner}, shard="column", ranks=ranks)
        gate, up = self.parts
        rows = slice(up.rows.start + inner, up.rows.stop + inner)
        shape = (2 * inner, inputs)
        self.parts: tuple[Part, ...] = (
            replace(gate, name="", shape=shape),
            replace(up, name="", shape=shape, rows=rows),
        )


class MLP(llama.MLP):
    """Llama's feed-forward network, whose gate and up are one tensor in checkpoints."""

    def __init__(self, config: LlamaConfig, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        self.gate_up_proj = FusedLinear(config.hidden_size, config.intermediate_size, ranks=ranks)


class Layer(llama.Layer):
    """A decoder layer with norms before and after attention and the feed-forward part."""

    def __init__(self, config: Any, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        self.post_self_attn_layernorm: RMSNorm = self.norm(config)
        self.post_mlp_layernorm: RMSNorm = self.norm(config)

    def feed_forward(self, config: Any, layer: int, ranks: Ranks) -> Normed:
        return MLP(config, layer, ranks)

    def forward(self, x: Tensor, residual: Tensor | None, mix: Mix) -> tuple[Tensor, Tensor]:
        x, residual = self.mixer.after_norm(self.input_layernorm, x, residual, mix)
        x, _ = self.post_self_attn_layernorm(x, None)
        x, residual = self.mlp.after_norm(self.post_attention_layernorm, x, residual)
        return self.post_mlp_layernorm(x, None)[0], residual


# ---- the models


class Body(Module):
    """The vision tower and the text decoder, by their names in checkpoints."""

    def __init__(self, config: Any, layer_class: type[llama.Layer], ranks: Ranks) -> None:
        super().__init__()
        self.visual = Tower(config.vision)
        self.language_model = llama.Decoder(config, layer_class, ranks)


class Seeing(llama.Llama):
    """What both models add to their text models."""

    model: Body

    def body(self, config: Any, ranks: Ranks) -> Module:
        return Body(config, self.layer_class, ranks)

    @property
    def decoder(self) -> llama.Decoder:
        return self.model.language_model

    @property
    def tower(self) -> Tower:
        return self.model.visual


class Glm4v(Seeing):
    """GLM-4.1V and GLM-4.6V-Flash for the engine."""

    config_class = Glm4vConfig
    layer_class = Layer

    @classmethod
    def tiny(cls, vision: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests; changes are of the text, `model_type` may be "glm46v"."""
        kind = changes.pop("model_type", "glm4v")
        sizes = {"vocab_size": 110, "num_hidden_layers": 3, "head_dim": None, "model_type": "glm4v_text"}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
        text = super().tiny(**{**sizes, "hidden_size": 48, "rope_parameters": rope, **changes})
        name = "Glm46VForConditionalGeneration" if kind == "glm46v" else "Glm4vForConditionalGeneration"
        return _tiny(name, kind, text, vision)


class Glm4vMoe(Seeing, glm4_moe.Glm4Moe):
    """GLM-4.5V and GLM-4.6V for the engine."""

    config_class = Glm4vMoeConfig
    layer_class = glm4_moe.Layer

    @classmethod
    def tiny(cls, vision: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests; changes are of the text."""
        sizes = {"vocab_size": 110, "model_type": "glm4v_moe_text", "use_qk_norm": False}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
        text = glm4_moe.Glm4Moe.tiny(**{**sizes, "rope_parameters": rope, **changes})
        return _tiny("Glm4vMoeForConditionalGeneration", "glm4v_moe", text, vision)


def _tiny(name: str, kind: str, text: dict[str, Any], vision: Mapping[str, Any] | None) -> dict[str, Any]:
    tower = {
        "model_type": "glm4v_moe_vision" if kind == "glm4v_moe" else "glm4v_vision",
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 20,
        "out_hidden_size": text["hidden_size"],
        "intermediate_size": 40,
    }
    del text["architectures"]
    return {
        "architectures": [name],
        "model_type": kind,
        "text_config": {key: value for key, value in text.items() if value is not None},
        "vision_config": tower | dict(vision or {}),
        "image_token_id": 101,
        "video_token_id": 102,
        "image_start_token_id": 103,
        "image_end_token_id": 104,
        "video_start_token_id": 105,
        "video_end_token_id": 106,
        "tie_word_embeddings": False,
    }
