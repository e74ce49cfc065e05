"""Gated delta layers in GGUF files: architectures qwen35, qwen35moe and qwen3next.

Their projections lie one by one, as Qwen3.5 has them. llama.cpp's converter stores -exp(A_log) and norms of 1 + weight.
In qwen35 and qwen35moe it also stores value heads in tiles, the first of every key head before the second ones, where
Hugging Face has all of a key head together. The layer of multi-token prediction is the block behind the last.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .gguf_blocks import Array, Blocks

ARCHITECTURES = {
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
}
# What is stored as it is, but for norms. `plain` converts the others.
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Integers of the metadata that the configuration is made from; those that a file must have come first.
NEEDED = (
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    "attention.key_length",
)
COUNTS = (
    *NEEDED,
    *("full_attention_interval", "rope.dimension_count", "expert_shared_feed_forward_length", "nextn_predict_layers"),
)
_PREDICTION = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
    "embed_tokens": "mtp.embed_tokens",
    "shared_head_head": "mtp.shared_head.head",
}
_NEXTN = re.compile(r"blk\.\d+\.nextn\.(\w+)\.weight")
_OWN = re.compile(r"blk\.(\d+)\.(ssm_\w+|attn_qkv|attn_gate|ffn_gate_inp_shexp)(?:\.(?:weight|bias))?")


def minus_one(values: Array) -> Array:
    return values - np.float32(1)


def _log_of_minus(values: Array) -> Array:
    return np.log(-values)


def config_values(values: Mapping[str, Any], rope: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return what the family adds to the values of a config.json. values: the metadata; rope: `rope_parameters`."""
    head_dim, predicted = values["attention.key_length"], values.get("nextn_predict_layers", 0)
    value_heads, layers = values["ssm.time_step_rank"], values["block_count"] - predicted
    rotated = values.get("rope.dimension_count", head_dim)
    sections = values.get("rope.dimension_sections")
    own: dict[str, Any] = {"partial_rotary_factor": rotated / head_dim}
    if isinstance(sections, list):
        own |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    config = {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": predicted,
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
        "linear_key_head_dim": values["ssm.state_size"],
        "linear_num_key_heads": values["ssm.group_count"],
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": values["ssm.inner_size"] // max(value_heads, 1),
        "linear_projections_by_head": False,
        "full_attention_interval": values.get("full_attention_interval", 4),
        "rope_parameters": dict(rope) | own,
    }
    if isinstance(recurrent := values.get("attention.recurrent_layers"), list):
        kinds = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
        config["layer_types"] = kinds[:layers]
    if arch != "qwen35":
        config["shared_expert_intermediate_size"] = values.get("expert_shared_feed_forward_length", 0)
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTensors:
    """How the tensors of a file become Hugging Face's. Value heads: `group` for each of the key heads."""

    layers: int  # of the model; a layer of multi-token prediction is behind them
    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> "DeltaTensors | None":
        """Return those of a family with gated delta layers, None for another."""
        if "linear_num_key_heads" not in config:
            return None
        key_heads = config["linear_num_key_heads"]
        return DeltaTensors(
            layers=config["num_hidden_layers"],
            key_heads=key_heads,
            group=config["linear_num_value_heads"] // max(key_heads, 1),
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            is_tiled=config["model_type"] != "qwen3_next",
        )

    def layer(self, number: str) -> str:
        """Return the beginning of the names of a layer's tensors."""
        return f"model.layers.{number}." if int(number) < self.layers else f"mtp.layers.{int(number) - self.layers}."

    def own(self, name: str, blocks: Blocks) -> list[tuple[str, Blocks]] | None:
        """Return what a tensor of the file becomes, by Hugging Face's names; None if nothing is special about it."""
        if (match := _NEXTN.fullmatch(name)) is not None and match[1] in _PREDICTION:
            is_norm = match[1].endswith("norm")
            return [(f"{_PREDICTION[match[1]]}.weight", replace(blocks, change=minus_one) if is_norm else blocks)]
        if (match := _OWN.fullmatch(name)) is None:
            return None
        layer = self.layer(match[1])
        return [(f"{layer}{own}", made) for own, made in self._converted(match[2], blocks)] or None

    def _converted(self, what: str, blocks: Blocks) -> Iterator[tuple[str, Blocks]]:
        """Yield the tensors that one becomes, by their names in the layer; none for one that is unknown."""
        shape = blocks.shape
        if what == "ffn_gate_inp_shexp":
            row = blocks if blocks.is_matrix else replace(blocks, shape=(1, *shape), data=blocks.data[None])
            yield "mlp.shared_expert_gate.weight", row
        elif what == "attn_qkv":
            yield "linear_attn.in_proj_qkv.weight", self._behind_keys(blocks)
        elif what == "ssm_conv1d":
            channels = self._behind_keys(blocks)
            yield "linear_attn.conv1d.weight", replace(channels, shape=(shape[0], 1, shape[1]))
        elif what in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
            names = {"attn_gate": "in_proj_z.weight", "ssm_alpha": "in_proj_a.weight", "ssm_beta": "in_proj_b.weight"}
            names |= {"ssm_a": "A_log", "ssm_dt": "dt_bias"}
            ordered = self._of_values(blocks, self.value_dim if what == "attn_gate" else 1)
            change = _log_of_minus if what == "ssm_a" else None
            yield f"linear_attn.{names[what]}", replace(ordered, change=change)
        elif what == "ssm_norm":
            yield "linear_attn.norm.weight", blocks
        elif what == "ssm_out":
            columns = self.value_order(self.value_dim)
            is_permuted = self.is_permuted and len(columns) == shape[-1]
            yield "linear_attn.out_proj.weight", replace(blocks, columns=columns if is_permuted else None)
        elif what == "ssm_ba":
            yield from self._by_head(blocks, {"in_proj_b": (1, self.group), "in_proj_a": (1, self.group)})
        elif what == "ssm_in":  # of older files of qwen3next
            values = self.group * self.value_dim
            sizes = {"in_proj_qkv": (2, self.key_dim), "": (1, values), "in_proj_z": (1, values)}
            yield from self._by_head(blocks, sizes)

    @property
    def is_permuted(self) -> bool:
        return self.is_tiled and self.group > 1 and self.key_heads > 1

    def value_order(self, width: int) -> Array:
        """Return where the file has each of `width` rows of each value head."""
        tiles = np.arange(self.group * self.key_heads * width).reshape(self.group, self.key_heads, width)
        return tiles.swapaxes(0, 1).reshape(-1)

    def _of_values(self, blocks: Blocks, width: int, keys: int = 0) -> Blocks:
        """Put the rows of values in order, which are behind those of queries and keys. A tensor that has another number
        of rows stays as it is, and `check_fit` reports it."""
        order = np.concatenate((np.arange(keys), keys + self.value_order(width)))
        return blocks.rows(order) if self.is_permuted and len(order) == blocks.shape[0] else blocks

    def _behind_keys(self, blocks: Blocks) -> Blocks:
        return self._of_values(blocks, self.value_dim, 2 * self.key_heads * self.key_dim)

    def _by_head(self, blocks: Blocks, sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Blocks]]:
        """Yield the projections of a tensor that has the rows of all of them for each key head.

        sizes: how many parts of how many rows each has for a head; "": more parts of the one before.
        """
        total = sum(count * size for count, size in sizes.values())
        if blocks.shape[0] != self.key_heads * total:  # `check_fit` reports it
            yield f"linear_attn.{next(iter(sizes))}.weight", blocks
            return
        places = np.arange(self.key_heads * total).reshape(self.key_heads, total)
        orders: dict[str, list[Array]] = {}
        first, name = 0, ""
        for own, (count, size) in sizes.items():
            name = own or name
            for _ in range(count):
                orders.setdefault(name, []).append(places[:, first : first + size].reshape(-1))
                first += size
        for name, parts in orders.items():
            yield f"linear_attn.{name}.weight", blocks.rows(np.concatenate(parts))
