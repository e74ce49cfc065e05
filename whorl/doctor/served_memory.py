"""What serving a launch's model takes on one rank, by the sizes of `whorl.plan`, for the fixes of memory errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from whorl.doctor.jobs import parts
from whorl.doctor.launch import Launch
from whorl.plan.model_shape import ModelShape, from_hugging_face
from whorl.plan.serving import cache_bytes, weight_bytes

GIB: Final = 2**30
FLOATS: Final = {"float32": 4, "float": 4, "float64": 8}
ONE_BYTE: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")  # of --kv-cache-dtype and --quantization
# Types of language models whose matrices are those of a type that whorl.plan knows.
SAME_SHAPE: Final = {
    "kimi_k2": "deepseek_v3",
    "mistral": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The bytes of a model on each of `tp` ranks. shape: None where whorl.plan does not know the model.

    weight: bytes of a weight; cache: bytes of an element of the KV cache; has_tower: the model has a vision or audio
    tower, whose weights are not counted.
    """

    shape: ModelShape | None = None
    tp: int = 1
    weight: float = 2
    cache: float = 2
    has_tower: bool = False

    def weights(self, tp: int | None = None) -> float | None:
        """Return the GiB of the weights of a rank."""
        return weight_bytes(self.shape, tp or self.tp, self.weight) / GIB if self.shape else None

    def token(self) -> float | None:
        """Return the GiB of a token in the cache of a rank."""
        return cache_bytes(self.shape, self.tp, self.cache) / GIB if self.shape else None

    def describe(self) -> str:
        """Say what whorl.plan counts, in a sentence; empty where it does not know the model."""
        weights, token = self.weights(), self.token()
        if weights is None or token is None:
            return ""
        ranks = f" on each of {self.tp} ranks" if self.tp > 1 else ""
        tower = " without its towers" if self.has_tower else ""
        return (
            f"By config.json the weights{tower} take {weights:.2f} GiB{ranks}, and the KV cache "
            f"{token * GIB / 1024:.0f} KiB a token."
        )

    def smallest_tp(self, room: float) -> int | None:
        """Return the least number of ranks on which the weights take at most `room` GiB, or None."""
        heads = self.shape.heads if self.shape else 0
        sizes = (tp for tp in range(self.tp + 1, heads + 1) if heads % tp == 0)
        return next((tp for tp in sizes if (self.weights(tp) or room + 1) <= room), None)


def served(launch: Launch) -> Served:
    """Return what a launch serves (of a job its rollout); sizes that nothing states have vLLM's defaults."""
    launch = parts(launch)[-1]
    text, model = launch.text or {}, launch.inputs.model or {}
    dtype = str(launch.get("dtype") or text.get("dtype") or text.get("torch_dtype")).removeprefix("torch.")
    element = FLOATS.get(dtype, 2)
    return Served(
        shape=_shape(text),
        tp=launch.number("tensor_parallel") or 1,
        weight=1 if launch.get("quantization") in ONE_BYTE else _stored_bytes(model) or element,
        cache=1 if launch.get("kv_cache_dtype") in ONE_BYTE else element,
        has_tower=any(isinstance(model.get(name), Mapping) for name in ("vision_config", "audio_config")),
    )


def _shape(text: Mapping[str, Any]) -> ModelShape | None:
    kind = str(text.get("model_type"))
    try:
        return from_hugging_face({**text, "model_type": SAME_SHAPE.get(kind, kind)}, "config.json")
    except (ValueError, TypeError):
        return None  # a model that the plan does not count: only the numbers of the log are used


# By quant_method, 4 bits and the 8 bits of a scale for 32 or 16 columns: these files do not give the bits.
FP4_BYTES = {"mxfp4": (4 + 8 / 32) / 8, "modelopt": (4 + 8 / 16) / 8, "modelopt_fp4": (4 + 8 / 16) / 8}


def _stored_bytes(model: Mapping[str, Any]) -> float | None:
    """Return the bytes of a quantised weight with its scales, or None for a checkpoint that is not quantised."""
    config = model.get("quantization_config") or model.get("compression_config")
    if not isinstance(config, Mapping):
        return None
    if (stored := FP4_BYTES.get(str(config.get("quant_method")))) is not None:
        return stored
    groups = config.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    scheme = {**config, **(schemes[0] if schemes and isinstance(schemes[0], Mapping) else {})}
    bits = scheme.get("bits") or scheme.get("w_bit") or scheme.get("num_bits") or 8
    group = scheme.get("group_size") or scheme.get("q_group_size")
    scales = 16 / group if isinstance(group, int) and group > 0 else 0.0
    return (bits + scales) / 8 if isinstance(bits, int) else None
