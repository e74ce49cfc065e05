"""From a path to a model and its tokenizer, on one device or shared among ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whorl.nn import Model

from .launch import Place
from .settings import EngineSettings
from .tensor_parallel import Lead
from .tensor_parallel import load as load_shared

if TYPE_CHECKING:
    from .llm import Tokenizer


def load(
    path: str | Path | None, tokenizer: "Tokenizer | None", device: str, asked: EngineSettings
) -> "tuple[Model, Tokenizer, Lead | None]":
    """tokenizer: one that takes the place of the model's own. The lead is rank 0's hold on the others."""
    from .tokenizer import Tokenizer as Real
    from .weights import load_model, resolve

    folder = resolve(path)
    place = Place.find(asked.tp)
    how: dict[str, Any] = {"device": device, "dtype": getattr(torch, asked.dtype) if asked.dtype else None}
    how |= {"max_length": asked.max_model_len, "unpack": asked.unpack, "quantize": asked.quantize}
    if place.size == 1:
        model = load_model(folder, **how)
        return model, tokenizer or Real.from_path(folder), None
    tokenizer = tokenizer or Real.from_path(folder)
    lead = load_shared(folder, place, kv_cache_dtype=asked.kv_cache_dtype, **how)
    return lead.model, tokenizer, lead
