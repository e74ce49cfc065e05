"""config.json of Qwen3-Next and of Qwen3.5's text models, in every form in which they are published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whorl.models.fields import count, flag, section
from whorl.models.llama_config import LlamaConfig
from whorl.models.qwen3 import Qwen3Config, experts_of

LINEAR, FULL = "linear_attention", "full_attention"
_EVERY = 4  # every fourth layer has attention
_COMMON: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mtp_num_hidden_layers": 1,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True}
# The defaults of Hugging Face's classes, by model_type without "_text".
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": _COMMON
    | _MOE
    | {"vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48}
    | {"num_experts": 512, "num_experts_per_tok": 10, "linear_projections_by_head": True},
    "qwen3_5": _COMMON
    | {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32}
    | {"num_key_value_heads": 4},
    "qwen3_5_moe": _COMMON
    | _MOE
    | {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
}
# Architectures, where config.json has no model_type.
_ARCHITECTURES = {"Qwen3NextForCausalLM": "qwen3_next", "Qwen3_5ForCausalLM": "qwen3_5"}
_ARCHITECTURES |= {"Qwen3_5MoeForCausalLM": "qwen3_5_moe"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig:
    """The sizes of a gated delta layer. Value head i uses key head i // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees, the newest included

    @staticmethod
    def read(values: Mapping[str, Any]) -> "DeltaConfig":
        sizes = DeltaConfig(
            key_heads=count(values, "linear_num_key_heads"),
            value_heads=count(values, "linear_num_value_heads"),
            key_dim=count(values, "linear_key_head_dim"),
            value_dim=count(values, "linear_value_head_dim"),
            kernel=count(values, "linear_conv_kernel_dim", least=2),
        )
        if sizes.value_heads % sizes.key_heads:
            raise ValueError(
                f"config.json: linear_num_value_heads is {sizes.value_heads}, expected a multiple of "
                f"linear_num_key_heads, {sizes.key_heads}"
            )
        return sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3NextConfig(Qwen3Config):
    """config.json of Qwen3-Next, or of the text model of Qwen3.5.

    kinds: what mixes the tokens of each layer, by the names of layer_types. projections_by_head: the checkpoint has the
    projections of a gated delta layer in one, by key head; llama.cpp's has not. shared_expert_size: of the expert that
    every token uses, in layers with experts. num_nextn_predict_layers: layers of multi-token prediction, of which the
    checkpoint may have none: they are read when something drafts with them.
    """

    kinds: tuple[str, ...]
    delta: DeltaConfig
    projections_by_head: bool = False
    shared_expert_size: int = 0
    num_nextn_predict_layers: int = 1

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        kind = family(values)
        values = DEFAULTS[kind] | {key: value for key, value in values.items() if value is not None}
        values |= {"model_type": kind}
        _check_gates(values)
        is_sparse = "num_experts" in DEFAULTS[kind]
        if kind == "qwen3_5_moe":  # all of its layers have experts, and its router always renormalizes
            values |= {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
            values |= {"intermediate_size": values["moe_intermediate_size"]}
        experts = experts_of(values) if is_sparse else None
        return LlamaConfig.read(values) | {
            "experts": experts,
            "shared_expert_size": count(values, "shared_expert_intermediate_size", least=0) if is_sparse else 0,
            "kinds": _kinds(values),
            "delta": DeltaConfig.read(values),
            "projections_by_head": flag(values, "linear_projections_by_head"),
            "num_nextn_predict_layers": count(values, "mtp_num_hidden_layers", least=0),
        }


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the text model: `text_config` where there is one, else all of them."""
    inner = section(values, "text_config")
    return {"model_type": values.get("model_type"), "architectures": values.get("architectures"), **(inner or values)}


def family(values: Mapping[str, Any]) -> str:
    """Return the model_type of a text model without its ending; ValueError for another family."""
    names = values.get("architectures") or [None]
    kind = values.get("model_type") or _ARCHITECTURES.get(str(names[0]))
    kind = str(kind).removesuffix("_text")
    if kind not in DEFAULTS:
        raise ValueError(f"config.json: model_type is {values.get('model_type')!r}, expected {', '.join(DEFAULTS)}")
    return kind


def _kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what mixes the tokens of each layer."""
    layers, kinds = count(values, "num_hidden_layers"), values.get("layer_types")
    if kinds is None:
        every = count(values, "full_attention_interval", _EVERY)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {LINEAR, FULL}:
        raise ValueError(f"config.json: layer_types is {kinds}, expected {layers} of {LINEAR}, {FULL}")
    return tuple(kinds)


def _check_gates(values: Mapping[str, Any]) -> None:
    """Raise ValueError for gates that no published model has."""
    if not flag(values, "attn_output_gate", True):
        raise ValueError("config.json: attn_output_gate is false, expected true: attention without a gate is Qwen3's")
    if (gate := values.get("output_gate_type", "silu")) not in ("silu", "swish"):
        raise ValueError(f"config.json: output_gate_type is {gate!r}, expected silu")
