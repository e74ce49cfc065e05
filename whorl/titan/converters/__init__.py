"""Switches for `--model.converters`: each puts our operators where a model has its own, and nothing else changes.

They run on the model before it is parallelised and serve TorchTitan's llama3, qwen3 and deepseek_v3 as well as ours.
The backend is chosen by device when an operator is called. The names of the Ascend plug-in are taken for ours.
"""

from .conversion import Converter
from .dsa import DSAConverter
from .gmm import GroupedMatmulConverter
from .permute import PermuteConverter
from .rms_norm import RMSNormConverter
from .rope import RopeConverter

_OURS: list[type[Converter]] = [
    RMSNormConverter,
    RopeConverter,
    PermuteConverter,
    GroupedMatmulConverter,
    DSAConverter,
]
CONVERTERS: dict[str, type[Converter]] = {converter.name: converter for converter in _OURS}
CONVERTERS |= {name.replace("whorl_", "npu_"): converter for name, converter in list(CONVERTERS.items())}
