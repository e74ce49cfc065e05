"""whorl: fast rotary-embedding language models on CPU, NVIDIA GPUs and Ascend NPUs."""

TYPE_CHECKING = False  # typing's is true for type checkers too; its import takes time in which Ctrl-C would print
if TYPE_CHECKING:
    from typing import Any

    from whorl.engine.llm import LLM
    from whorl.engine.sampling_params import SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "SamplingParams", "__version__", "ops"]


def __getattr__(name: str) -> "Any":
    import importlib

    # These load on first use, because the doctor must run where torch is not installed.
    if name == "ops":
        return importlib.import_module("whorl.ops")
    if name in ("LLM", "SamplingParams"):
        return getattr(importlib.import_module("whorl.engine"), name)
    raise AttributeError(f"module 'whorl' has no attribute {name!r}")
