"""Qwen3.5 (also 3.6 and 3.8), dense and mixture of experts: Qwen3-Next's layers by other names, with vision or without.

The vision tower is Qwen3-VL's without deepstack; positions are numbered and rotated as there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from whorl.models import llama, qwen3_next
from whorl.models.fields import flag
from whorl.models.qwen3_next_config import Qwen3NextConfig, text_values
from whorl.models.qwen3_vl import tiny_tower, vision_fields
from whorl.models.qwen3_vl_tower import Tower
from whorl.models.qwen3_vl_tower_config import TowerConfig
from whorl.nn import Ranks
from whorl.positions import PositionRule

# The defaults of Hugging Face's classes.
_TOKEN_IDS = {"image_token_id": 248056, "video_token_id": 248057}


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3_5TextConfig(Qwen3NextConfig):
    """config.json of a text model, flat or with a `text_config`."""

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        return Qwen3NextConfig.read(text_values(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3_5Config(Qwen3NextConfig):
    """config.json with vision: the fields of the text model, and `vision`, the tower's."""

    vision: TowerConfig
    position_rule: PositionRule
    image_token_id: int
    video_token_id: int

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        fields = Qwen3NextConfig.read(text_values(values))
        # text_config has a field of this name, too, which is not read.
        fields["tie_word_embeddings"] = flag(values, "tie_word_embeddings")
        return fields | vision_fields(values, fields, _TOKEN_IDS, deepstack=())


class Qwen3_5Text(qwen3_next.Qwen3Next):
    """The text model of Qwen3.5."""

    config_class: type[Qwen3NextConfig] = Qwen3_5TextConfig

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a flat config.json small enough for tests; `num_experts` makes it sparse."""
        is_sparse = bool(changes.get("num_experts"))
        kind, name = (
            ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") if is_sparse else ("qwen3_5_text", "Qwen3_5ForCausalLM")
        )
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        names = {"architectures": [name], "model_type": kind, "rope_parameters": rope}
        values = {**qwen3_next.tiny_sizes(), **names, **(qwen3_next.TINY_EXPERTS if is_sparse else {}), **changes}
        config = llama.Llama.tiny(**values)
        if is_sparse:
            del config["intermediate_size"]
        return config


class Body(Module):
    """The vision tower and the text decoder, by their names in checkpoints."""

    def __init__(self, config: Qwen3_5Config, ranks: Ranks) -> None:
        super().__init__()
        self.visual = Tower(config.vision)
        self.language_model = llama.Decoder(config, qwen3_next.Layer, ranks)


class Qwen3_5(Qwen3_5Text):
    """Qwen3.5 with vision."""

    config_class = Qwen3_5Config
    model: Body

    def body(self, config: Qwen3_5Config, ranks: Ranks) -> Module:
        return Body(config, ranks)

    @property
    def decoder(self) -> llama.Decoder:
        return self.model.language_model

    @property
    def tower(self) -> Tower:
        return self.model.visual

    @classmethod
    def tiny(cls, vision: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests; changes are of the text, `num_experts` makes it sparse."""
        text = super().tiny(**{"vocab_size": 110, **changes})
        name = text.pop("architectures")[0].removesuffix("ForCausalLM")
        kind = text["model_type"].removesuffix("_text")
        tower = {**tiny_tower(text["hidden_size"]), "model_type": f"{kind}_vision"}
        del tower["deepstack_visual_indexes"]
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": kind,
            "text_config": text,
            "vision_config": tower | dict(vision or {}),
            "image_token_id": 101,
            "video_token_id": 102,
            "vision_start_token_id": 103,
            "vision_end_token_id": 104,
            "tie_word_embeddings": False,
        }
