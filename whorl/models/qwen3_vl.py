"""Qwen3-VL, dense and mixture of experts: Qwen3 with the features of images and videos in place of placeholder tokens.

The features come from the tower in qwen3_vl_tower.py. They replace the embeddings of placeholder tokens, and more of
them are added after the first layers (deepstack): `whorl.nn.Inserted`. Positions have three axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module

from whorl.models import llama, qwen3
from whorl.models.fields import count, flag
from whorl.models.qwen3_vl_tower import Tower
from whorl.models.qwen3_vl_tower_config import TowerConfig
from whorl.models.vision_tower_config import check_width
from whorl.nn import Ranks, StackedExperts
from whorl.positions import PositionRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLConfig(qwen3.Qwen3Config):
    """config.json of Qwen3-VL: the fields of the text model, and `vision`, the tower's."""

    vision: TowerConfig
    position_rule: PositionRule
    image_token_id: int
    video_token_id: int

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        fields = qwen3.Qwen3Config.read({**_section(values, "text_config"), "model_type": values.get("model_type")})
        if fields["experts"] is not None:  # the router always renormalises; config.json has no field for it
            fields["experts"] = replace(fields["experts"], norm_topk_prob=True)
        # text_config has a field of this name, too, which is not read.
        fields["tie_word_embeddings"] = flag(values, "tie_word_embeddings")
        return fields | vision_fields(values, fields, _TOKEN_IDS)


_TOKEN_IDS = {"image_token_id": 151655, "video_token_id": 151656}


def vision_fields(
    values: Mapping[str, Any],
    text: Mapping[str, Any],
    token_ids: Mapping[str, int],
    deepstack: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Return the fields about vision of a config.json.

    text: the fields of the text model. token_ids: the default ids of placeholders. deepstack: the tower's
    deepstack_visual_indexes, where config.json has none.
    """
    vision = dict(_section(values, "vision_config"))
    if deepstack is not None:
        vision["deepstack_visual_indexes"] = deepstack
    tower = TowerConfig.from_hf(vision)
    check_width(tower, text)
    _check_deepstack(text, tower)
    ids = {name: count(values, name, default) for name, default in token_ids.items()}
    merge = {"spatial_merge_size": tower.spatial_merge_size}
    rule = PositionRule.from_hf({"model_type": values.get("model_type"), "vision_config": merge, **ids})
    return {"vision": tower, "position_rule": rule, **ids}


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    if not isinstance(section, Mapping):
        raise ValueError(f"config.json: {name} is {section!r}, expected an object with names and values")
    return section


def _check_deepstack(text: Mapping[str, Any], tower: TowerConfig) -> None:
    if len(tower.deepstack_visual_indexes) > text["num_hidden_layers"]:
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes has {len(tower.deepstack_visual_indexes)} layers, "
            f"expected at most the text's number of layers, {text['num_hidden_layers']}"
        )


class MoE(qwen3.MoE):
    """Experts that the checkpoint stores in two tensors per layer."""

    experts_class = StackedExperts


class Layer(qwen3.Layer):
    """A decoder layer with such experts."""

    moe_class = MoE


class Body(Module):
    """The vision tower and the text decoder, by their names in checkpoints."""

    def __init__(self, config: Qwen3VLConfig, ranks: Ranks) -> None:
        super().__init__()
        self.visual = Tower(config.vision)
        self.language_model = llama.Decoder(config, Layer, ranks)


class Qwen3VL(qwen3.Qwen3):
    """Qwen3-VL for the engine."""

    config_class = Qwen3VLConfig
    layer_class = Layer
    model: Body

    def body(self, config: Qwen3VLConfig, ranks: Ranks) -> Module:
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
        sizes = {"vocab_size": 110, "num_hidden_layers": 3, "rope_parameters": _rope()}
        text = super().tiny(**{**sizes, **changes})
        is_sparse = text["model_type"] == "qwen3_moe"
        del text["architectures"]
        kind = "qwen3_vl_moe" if is_sparse else "qwen3_vl"
        return {
            "architectures": ["Qwen3VLMoeForConditionalGeneration" if is_sparse else "Qwen3VLForConditionalGeneration"],
            "model_type": kind,
            "text_config": text | {"model_type": f"{kind}_text"},
            "vision_config": tiny_tower(text["hidden_size"]) | {"model_type": f"{kind}_vision"} | dict(vision or {}),
            "image_token_id": 101,
            "video_token_id": 102,
            "vision_start_token_id": 103,
            "vision_end_token_id": 104,
            "tie_word_embeddings": False,
        }


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def tiny_tower(width: int) -> dict[str, Any]:
    """Return a vision_config small enough for tests; width: of the text."""
    return {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": width,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    }
