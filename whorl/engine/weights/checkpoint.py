"""A checkpoint that has been opened and not been read: its configuration, and its tensors by name."""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Index
from whorl.nn import weights as formats

log = logging.getLogger(__name__)
# Where config.json says nothing of quantisation: who writes such a file.
_QUANTISATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quant_model_description.json": "modelslim",
    "quant_model_description_w8a8.json": "modelslim",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A tensor that has not been read yet. `read` gives its `index` part, in the dtype `gives`."""

    shape: tuple[int, ...]
    dtype: str  # as the file has it, in the file's words
    gives: torch.dtype | None  # None: torch has no such dtype
    nbytes: int
    read: Callable[[Index], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """config.json's values and the tensors by Hugging Face's names, in the order they lie on disk."""

    path: Path
    config: dict[str, Any]
    sources: dict[str, Source]
    packed: Callable[[], "Checkpoint"] | None = None  # where sources unpack what they read: the same as it is stored


def read_config(folder: Path) -> dict[str, Any]:
    config = read_object(folder / "config.json")
    if "auto_map" in config:
        log.warning("%s: auto_map is ignored: code that comes with a checkpoint is never run", folder)
    config = _with_quantisation(folder, config)
    try:
        formats.find(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return config


def _with_quantisation(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Old quantisers, and some of today's, say in a file of their own what they have done."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in _QUANTISATION_FILES.items():
        if (folder / name).is_file():
            config = {**config, "quantization_config": {"quant_method": method, **read_object(folder / name)}}
            log.info("%s: the weights are quantised as %s says (%s)", folder, name, method)
            break
    return config


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(found).__name__}")
    return found


def some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
