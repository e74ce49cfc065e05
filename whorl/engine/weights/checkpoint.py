"""An open checkpoint: its configuration, and its tensors by name, which are read later."""

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
# Files that describe the quantisation if config.json does not, and the method that writes them.
_QUANTISATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quant_model_description.json": "modelslim",
    "quant_model_description_w8a8.json": "modelslim",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A tensor in a checkpoint. `read(index)` returns that part of it, in the dtype `gives`."""

    shape: tuple[int, ...]
    dtype: str  # in the file, by the file format's name
    gives: torch.dtype | None  # None: torch has no such dtype
    nbytes: int
    read: Callable[[Index], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The values of config.json, and the tensors by Hugging Face's names, in their order on disk."""

    path: Path
    config: dict[str, Any]
    sources: dict[str, Source]
    packed: Callable[[], "Checkpoint"] | None = None  # without unpacking, if sources unpack


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values of config.json with those of a quantisation file; ValueError if they cannot be used."""
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
    """Add the values of a separate quantisation file, which old quantisers and some present ones write."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in _QUANTISATION_FILES.items():
        if (folder / name).is_file():
            config = {**config, "quantization_config": {"quant_method": method, **read_object(folder / name)}}
            log.info("%s: the weights are quantised as %s says (%s)", folder, name, method)
            break
    return config


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ValueError if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(values).__name__}")
    return values


def some(names: Iterable[str], limit: int = 8) -> str:
    """Return the first names, for a message."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
