"""The inference engine. Start reading in llm.py."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "LLM": "whorl.engine.llm",
    "SamplingParams": "whorl.engine.sampling_params",
    "load_model": "whorl.engine.weights",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
