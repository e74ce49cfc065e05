"""Formats of weights by the `quant_method` of config.json. Each is one file, imported when a checkpoint needs it.

Shapes in these files: a matrix is [N, K], with N rows (outputs) and K columns (inputs). ".." before them stands for the
experts of a stack, or for nothing.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from whorl.nn.weight import Formats

from .dense import ALL_DENSE
from .dense import DENSE as DENSE
from .quantised import NEVER_QUANTISED as NEVER_QUANTISED

if TYPE_CHECKING:
    import torch

    from .rounding import Rounder

# By quant_method: "module:function", a function from the values of `quantization_config` to `Formats`. Other packages
# may add theirs.
FORMATS: dict[str, str] = {
    "fp8": "whorl.nn.weights.fp8:formats",
    "compressed-tensors": "whorl.nn.weights.compressed:formats",
    "awq": "whorl.nn.weights.awq:formats",
    "gptq": "whorl.nn.weights.gptq:formats",
    "gguf": "whorl.nn.weights.gguf_formats:formats",
    "mxfp4": "whorl.nn.weights.fp4:stacked_mxfp4",
    "modelopt": "whorl.nn.weights.fp4:modelopt",
    "modelopt_fp4": "whorl.nn.weights.fp4:modelopt",
}
# Likewise, of formats that the loader chooses and no config.json names: of weights that are rounded while they are read
# (`LOADED`), and of those that stay in 16 bits.
LOADED_FORMATS = {
    "cpu4": "whorl.nn.weights.cpu4:formats",
    "panels": "whorl.nn.weights.panel_rounding:formats",
    "stored": "whorl.nn.weights.stored:formats",
}
# Methods that are not supported, with the description that the error gives.
REFUSED = {
    "nvfp4": "NVFP4 of a tool that is not known; expected are compressed-tensors' and ModelOpt's",
    "ascend": "modelslim's, for Ascend",
    "modelslim": "modelslim's, for Ascend",
    "auto-round": "AutoRound's own layout",
    "auto_round": "AutoRound's own layout",
    "intel/auto-round": "AutoRound's own layout",
    "bitsandbytes": "of bitsandbytes",
    "fbgemm_fp8": "FP8 of FBGEMM",
}


def find(config: Mapping[str, Any]) -> Formats:
    """Return the formats of a checkpoint.

    config: the values of config.json; without a `quantization_config` all weights are plain. Raises ValueError for a
    `quant_method` that is not supported.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return ALL_DENSE
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    readers = FORMATS | LOADED_FORMATS
    if not isinstance(method, str) or method not in readers:
        description = REFUSED.get(method) if isinstance(method, str) else None
        known = ", ".join([*FORMATS, "bfloat16, float16 or float32"])
        raise ValueError(
            f"the weights are quantised ({method}{f': {description}' if description else ''}); expected {known}"
        )
    return _imported(readers[method])(settings)  # type: ignore[no-any-return]


def settings_as_stored(tensors: Mapping[str, tuple[int, "torch.dtype | None"]]) -> dict[str, Any] | None:
    """Return the `quantization_config` by which a plain checkpoint stays as it is stored, see `stored.settings`."""
    from . import stored

    return stored.settings(tensors)


SCHEME_NAMES = ("w4a16", "w8a8", "fp8")  # schemes that checkpoints are written in
# Schemes that weights are rounded to while they are read, and the class that does it.
LOADED = {**dict.fromkeys(SCHEME_NAMES, "rounding:Rounding"), "cpu4": "cpu4:CpuRounding"}


def check_scheme(scheme: str | None, device: str) -> None:
    """Raise ValueError if weights cannot be rounded to `scheme` while they are read, or not for this device."""
    if scheme is not None and scheme not in LOADED:
        raise ValueError(f"quantize is {scheme!r}, expected one of {', '.join(LOADED)}")
    if scheme is not None:
        rounder(scheme).check_device(device)


def rounder(scheme: str) -> "type[Rounder]":
    """Return the class that rounds weights to `scheme`."""
    if scheme == "cpu4":
        from whorl.ops.cpu import library

        if library.missing() is None:
            return _imported(f"{__name__}.panel_rounding:PanelRounding")  # type: ignore[no-any-return]
    return _imported(f"{__name__}.{LOADED[scheme]}")  # type: ignore[no-any-return]


def rounding_to(
    scheme: str, columns: Mapping[str, int], block_scales: str | None = None, *, is_head: bool = False
) -> "Rounder":
    """Return how matrices, or a head, are rounded to `scheme`.

    columns: the number of columns of each matrix, by name. block_scales: for a model that is published in FP8 with a
    scale per block, the kind of these scales, "ue8m0" or "float"; None for other models.
    """
    from .rounding import SCHEMES, BlockRounding, Rounding, group_size

    if scheme == "fp8" and block_scales is not None:
        return BlockRounding(has_powers=block_scales == "ue8m0")
    if scheme not in SCHEMES:
        return rounder(scheme)(2 if is_head else 1)  # type: ignore[call-arg]
    layout = SCHEMES[scheme]
    return Rounding(layout, group_size(columns) if layout.has_groups else None)


def _imported(name: str) -> Any:
    """Return what a "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
