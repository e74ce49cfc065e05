"""Formats of weights by the `quant_method` that a config.json names. One file each, imported when one is asked for."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from whorl.nn.weight import Formats

from .dense import ALL_DENSE, DENSE

if TYPE_CHECKING:
    from .fp8_blocks import BlockRounding
    from .rounding import Rounding

# "module:function": from the values of `quantization_config` to `Formats`. Packages outside may add theirs.
FORMATS: dict[str, str] = {
    "fp8": "whorl.nn.weights.fp8:formats",
    "compressed-tensors": "whorl.nn.weights.compressed:formats",
    "awq": "whorl.nn.weights.awq:formats",
    "gptq": "whorl.nn.weights.gptq:formats",
    "gguf": "whorl.nn.weights.gguf:formats",
}
# What others call theirs, for a message that says what it is.
REFUSED = {
    "mxfp4": "MXFP4: e2m1 values in blocks of 32, as gpt-oss has them",
    "modelopt": "NVFP4 or FP8 of NVIDIA's ModelOpt",
    "modelopt_fp4": "NVFP4 of NVIDIA's ModelOpt",
    "nvfp4": "NVFP4",
    "ascend": "modelslim's, for Ascend",
    "modelslim": "modelslim's, for Ascend",
    "auto-round": "AutoRound's own layout",
    "auto_round": "AutoRound's own layout",
    "intel/auto-round": "AutoRound's own layout",
    "bitsandbytes": "of bitsandbytes",
    "fbgemm_fp8": "FP8 of FBGEMM",
}


def find(config: Mapping[str, Any]) -> Formats:
    """The formats of a checkpoint, from the values of its config.json."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return ALL_DENSE
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    if not isinstance(method, str) or method not in FORMATS:
        what = REFUSED.get(method) if isinstance(method, str) else None
        known = ", ".join([*FORMATS, "bfloat16, float16 or float32"])
        raise ValueError(f"the weights are quantised ({method}{f': {what}' if what else ''}); expected {known}")
    module, _, name = FORMATS[method].partition(":")
    return getattr(import_module(module), name)(settings)  # type: ignore[no-any-return]


SCHEMES = ("w4a16", "w8a8", "fp8")  # that weights are rounded to


def rounding_to(scheme: str, columns: Mapping[str, int], block_scales: str | None = None) -> "Rounding | BlockRounding":
    """How matrices are rounded to fewer bits. columns: of each, by name. block_scales: of a model whose makers publish
    FP8 in blocks, what their scales are, "ue8m0" or "float"."""
    if scheme == "fp8" and block_scales is not None:
        from .fp8_blocks import BlockRounding

        return BlockRounding(has_powers=block_scales == "ue8m0")
    from .rounding import SCHEMES, Rounding, group_size

    own = SCHEMES[scheme]
    return Rounding(own, group_size(columns) if own.has_groups else None)


__all__ = ["ALL_DENSE", "DENSE", "FORMATS", "REFUSED", "SCHEMES", "find", "rounding_to"]
