"""Qwen2-VL and Qwen2.5-VL: Qwen2 with the features of images and videos in place of placeholder tokens.

The features come from the towers in qwen2_vl_tower.py. Positions have three axes; a video is one run of placeholders,
and in Qwen2.5-VL the positions of its frames follow the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module

from whorl.models import llama, qwen2
from whorl.models.checkpoint_tensors import renamed
from whorl.models.fields import count, flag, section
from whorl.models.qwen2_vl_tower import Tower, TowerConfig, WindowedTower, WindowedTowerConfig
from whorl.models.vision_tower import VisionTower
from whorl.models.vision_tower_config import check_width
from whorl.nn import Ranks
from whorl.positions import PositionRule

# The defaults of Hugging Face's class for the text model, where they are not Qwen2's.
_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "max_position_embeddings": 32768}
_TOKEN_IDS = {"image_token_id": 151655, "video_token_id": 151656}


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2VLConfig(qwen2.Qwen2Config):
    """config.json of Qwen2-VL and Qwen2.5-VL: the fields of the text model, and `vision`, the tower's."""

    vision: TowerConfig | WindowedTowerConfig
    position_rule: PositionRule
    image_token_id: int
    video_token_id: int

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        kind = values.get("model_type")
        # Published files have the fields of the text model beside `vision_config`, newer ones in `text_config`.
        text = section(values, "text_config") or {k: v for k, v in values.items() if k != "vision_config"}
        fields = qwen2.Qwen2Config.read({**_DEFAULTS, **text, "model_type": kind})
        tower_class = WindowedTowerConfig if kind == "qwen2_5_vl" else TowerConfig
        tower = tower_class.from_hf(section(values, "vision_config"))
        check_width(tower, fields)
        ids = {name: count(values, name, default) for name, default in _TOKEN_IDS.items()}
        rule = {"spatial_merge_size": tower.spatial_merge_size}
        if isinstance(tower, WindowedTowerConfig):
            rule["tokens_per_second"] = tower.tokens_per_second
        position_rule = PositionRule.from_hf({"model_type": kind, "vision_config": rule, **ids})
        return fields | {
            "tie_word_embeddings": flag(values, "tie_word_embeddings") or flag(text, "tie_word_embeddings"),
            "vision": tower,
            "position_rule": replace(position_rule, past_time=True),  # as the models were trained
            **ids,
        }


class Qwen2VL(qwen2.Qwen2):
    """Qwen2-VL and Qwen2.5-VL for the engine, by the names of published checkpoints."""

    config_class = Qwen2VLConfig
    config: Qwen2VLConfig
    tensors = staticmethod(renamed(("model.visual.", "visual."), ("model.language_model.", "model.")))
    visual: VisionTower

    def __init__(self, config: Qwen2VLConfig, **options: Any) -> None:
        super().__init__(config, **options)
        vision = config.vision
        self.visual = WindowedTower(vision) if isinstance(vision, WindowedTowerConfig) else Tower(vision)

    def body(self, config: Any, ranks: Ranks) -> Module:
        return llama.Decoder(config, self.layer_class, ranks)

    @property
    def tower(self) -> VisionTower:
        return self.visual

    @classmethod
    def tiny(cls, vision: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests; changes are of the text, `model_type` "qwen2_5_vl" among
        them."""
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        sizes = {"vocab_size": 110, "num_hidden_layers": 3, "rope_parameters": rope, "model_type": "qwen2_vl"}
        text = super().tiny(**{**sizes, **changes})
        kind = text["model_type"]
        has_windows = kind == "qwen2_5_vl"
        del text["architectures"]
        tower = _tiny_windowed(text["hidden_size"]) if has_windows else _tiny_tower(text["hidden_size"])
        return {
            "architectures": [f"Qwen2{'_5_' if has_windows else ''}VLForConditionalGeneration"],
            "model_type": kind,
            "text_config": text | {"model_type": f"{kind}_text"},
            "vision_config": tower | {"model_type": f"{kind}_vision"} | dict(vision or {}),
            "image_token_id": 101,
            "video_token_id": 102,
            "vision_start_token_id": 103,
            "vision_end_token_id": 104,
            "tie_word_embeddings": False,
        }


def _tiny_tower(width: int) -> dict[str, Any]:
    return {"depth": 3, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4, "hidden_size": width}


def _tiny_windowed(width: int) -> dict[str, Any]:
    return {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": width,
        "window_size": 24,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    }
