"""config.json of Llama, and of the families that extend it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whorl.models.fields import count, flag, number
from whorl.rope_config import RopeConfig

BIASES = ("attention_bias", "output_bias", "mlp_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """config.json by its own names; `rope` is the rotation it describes.

    windows: how many keys a query of each layer attends to; None: all. attention_bias: queries, keys and values have a
    bias; output_bias: o_proj has one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Read a config.json; raises ValueError for a missing or unsupported value."""
        return cls(**cls.read(values))

    @staticmethod
    def read(values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields above, with the defaults of Hugging Face's class."""
        if (activation := values.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ValueError(f"config.json: hidden_act is {activation!r}, expected silu")
        return LlamaConfig.sizes(values) | {"rope": RopeConfig.from_hf(values)}

    @staticmethod
    def sizes(values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields but `rope`."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        counts = {name: count(values, name) for name in sizes}
        heads = counts["num_attention_heads"]
        kv_heads = count(values, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads is {heads}, expected a multiple of num_key_value_heads, {kv_heads}"
            )
        return counts | {
            "num_key_value_heads": kv_heads,
            "head_dim": count(values, "head_dim", counts["hidden_size"] // heads),
            "rms_norm_eps": number(values, "rms_norm_eps", 1e-6),
            "windows": (None,) * counts["num_hidden_layers"],
            "output_bias": flag(values, "attention_bias"),
            **{name: flag(values, name) for name in ("tie_word_embeddings", "attention_bias", "mlp_bias")},
        }


# ---- sliding windows: how many keys a query of each layer attends to, None for all

_KINDS = {"sliding_attention", "full_attention"}


def layer_windows(values: Mapping[str, Any], *, first: int | None = None, named: bool = True) -> tuple[int | None, ...]:
    """Return the window of each layer, as Qwen configures them.

    The layers that layer_types calls sliding have a window, or without layer_types those from max_window_layers on.
    first: used in place of max_window_layers. named: False ignores layer_types.
    """
    layers, values = count(values, "num_hidden_layers"), {"sliding_window": 4096, **values}
    if not flag(values, "use_sliding_window") or not values["sliding_window"]:
        return (None,) * layers
    first = count(values, "max_window_layers", 28, least=0) if first is None else first
    kinds = values.get("layer_types") if named else None
    kinds = kinds or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return windows_of(values, kinds)


def windows_of(values: Mapping[str, Any], kinds: Any) -> tuple[int | None, ...]:
    """Return the window of each layer; kinds: the layer_types of config.json."""
    layers = count(values, "num_hidden_layers")
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds)
    ):
        raise ValueError(f"config.json: layer_types is {kinds}, expected {layers} of sliding_attention, full_attention")
    size = count(values, "sliding_window")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)
