"""Formats of weights by the `quant_method` that a config.json names. One file each, imported when one is asked for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from whorl.nn.weight import Formats

from .dense import ALL_DENSE

# "module:function": from the values of `quantization_config` to `Formats`. Packages outside may add theirs.
FORMATS: dict[str, str] = {}


def find(config: Mapping[str, Any]) -> Formats:
    """The formats of a checkpoint, from the values of its config.json."""
    settings = config.get("quantization_config")
    if not settings:
        return ALL_DENSE
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    if not isinstance(method, str) or method not in FORMATS:
        known = ", ".join([*FORMATS, "bfloat16, float16 or float32"])
        raise ValueError(f"the weights are quantised ({method}); expected {known}")
    module, _, name = FORMATS[method].partition(":")
    return getattr(import_module(module), name)(settings)  # type: ignore[no-any-return]


__all__ = ["ALL_DENSE", "FORMATS", "find"]
