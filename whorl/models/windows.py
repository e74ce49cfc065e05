"""Sliding windows of config.json: how many keys a query of each layer attends to, None for all."""

from collections.abc import Mapping
from typing import Any

from whorl.models.fields import count, flag

_KINDS = {"sliding_attention", "full_attention"}


def by_layer(values: Mapping[str, Any], *, first: int | None = None, named: bool = True) -> tuple[int | None, ...]:
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
    return of_kinds(values, kinds)


def of_kinds(values: Mapping[str, Any], kinds: Any) -> tuple[int | None, ...]:
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
