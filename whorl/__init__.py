"""whorl: fast rotary-embedding language models on CPU, NVIDIA GPUs and Ascend NPUs."""

import importlib
from types import ModuleType

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]


def __getattr__(name: str) -> ModuleType:
    # Loaded on first use: the doctor must run where torch is not installed.
    if name == "ops":
        return importlib.import_module("whorl.ops")
    raise AttributeError(f"module 'whorl' has no attribute {name!r}")
