"""All converters by name: those for any model, and those of single models."""

from typing import Any

from whorl.titan.deepseek_v32.converter import DSAConverter

from .conversion import Converter
from .gmm import GroupedMatmulConverter
from .permute import PermuteConverter
from .rms_norm import RMSNormConverter
from .rope import RopeConverter

_OURS: list[type[Converter[Any]]] = [
    RMSNormConverter,
    RopeConverter,
    PermuteConverter,
    GroupedMatmulConverter,
    DSAConverter,
]
CONVERTERS: dict[str, type[Converter[Any]]] = {converter.name: converter for converter in _OURS}
# The names in the Ascend plug-in of TorchTitan are aliases.
CONVERTERS |= {name.replace("whorl_", "npu_"): converter for name, converter in list(CONVERTERS.items())}
