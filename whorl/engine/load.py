"""Load a model and its tokenizer from a path, on one device or sharded over ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.nn import Model
from whorl.streams import leave_default_stream

from .launch import RankPlace
from .memory import named_errors
from .settings import EngineSettings
from .tensor_parallel import Lead
from .tensor_parallel import load as load_shared

if TYPE_CHECKING:
    from .llm import Tokenizer
    from .speculate import Proposer


def use_one_stream(settings: EngineSettings) -> None:
    """Let this thread leave the default stream before anything is launched on the device (see streams.py).

    Several ranks stay on it: their collectives have streams of their own, and each rank chooses its device later.
    """
    if RankPlace.find(settings.tp).size == 1:
        leave_default_stream(settings.device)


def load(
    path: str | Path | None,
    tokenizer: "Tokenizer | None",
    device: str,
    settings: EngineSettings,
    proposer: "Proposer | None" = None,
) -> "tuple[Model, Tokenizer, Lead | None]":
    """Return the model, its tokenizer and, with several ranks, rank 0's `Lead`.

    tokenizer: replaces the model's own. proposer: the other ranks load its draft head as well, if it has one.
    """
    from .tokenizer import Tokenizer as FileTokenizer
    from .weights import load_model, resolve

    folder = resolve(path)
    place = RankPlace.find(settings.tp)
    reserve = settings.memory or 0
    with named_errors(f"loading {folder}"):
        if place.size == 1:
            model = load_model(folder, settings, device=device, reserve=reserve)
            return model, tokenizer or FileTokenizer.from_path(folder), None
        tokenizer = tokenizer or FileTokenizer.from_path(folder)
        more: dict[str, Any] = {"kv_cache_dtype": settings.kv_cache_dtype, "proposer": proposer}
        lead = load_shared(folder, place, settings, device=device, reserve=reserve, **more)
        return lead.model, tokenizer, lead
