"""Load a model and its tokenizer from a path, on one device or sharded over ranks."""

from pathlib import Path
from typing import TYPE_CHECKING

from whorl.nn import Model, Ranks
from whorl.streams import leave_default_stream

from .heap import give_back
from .launch import RankPlace
from .memory import named_errors
from .sequence_parallel import for_ranks
from .settings import EngineSettings
from .tensor_parallel import Lead
from .tensor_parallel import load as load_shared

if TYPE_CHECKING:
    from .sequence import Tokenizer
    from .speculate import Proposer


def use_one_stream(settings: EngineSettings) -> None:
    """Let this thread leave the default stream before anything is launched on the device (see streams.py).

    Several ranks stay on it: their collectives have streams of their own, and each rank chooses its device later.
    """
    if RankPlace.find(settings.num_ranks).size == 1:
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

    place = RankPlace.find(settings.num_ranks)
    if settings.divides_experts and place.size == 1:
        raise ValueError("ep: there is one rank; give --ep, or --tp with --expert-parallel")
    if place.size == 1:
        for_ranks(settings, 1, device=device)  # raises before anything is loaded
    folder = resolve(path)
    with named_errors(f"loading {folder}"):
        if place.size == 1:
            ranks = Ranks(segments=settings.tp_segments or 0)
            model = load_model(folder, settings, device=device, tp=ranks, reserve=settings.memory or 0)
            tokenizer = tokenizer or FileTokenizer.from_path(folder)
            give_back()  # what lists of a vocabulary took, which its tokenizer has copied
            return model, tokenizer, None
        tokenizer = tokenizer or FileTokenizer.from_path(folder)
        lead = load_shared(folder, place, settings, device=device, proposer=proposer)
        return lead.model, tokenizer, lead


def check_passed(settings: EngineSettings) -> None:
    """Raise ValueError for settings that need the path of a model, when one is passed as an object."""
    if settings.num_ranks not in (None, 1):
        raise ValueError(
            f"LLM: tp or ep is {settings.num_ranks}, expected 1 for a model that is passed as an object; pass its "
            "path, so that every rank can load it"
        )
    if settings.tp_segments is not None:
        raise ValueError("LLM: tp_segments needs the path of a model; build one that is passed with Ranks(segments=)")
