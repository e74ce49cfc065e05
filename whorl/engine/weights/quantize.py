"""Present a checkpoint as a quantised one: its tensors are rounded as they are read."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Index, Matrix
from whorl.nn import weights as formats

from .checkpoint import Checkpoint, Source

# Not quantised: the head, the router, the weights of an indexer's heads, and the gates of a recurrence and of a shared
# expert. Their errors cost most, their bytes little.
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"
KEPT = (_HEAD, *(f"re:.*{re.escape(name)}$" for name in formats.NEVER_QUANTISED if name != _EMBEDDING))
_LAYER = re.compile(r"model\.layers\.\d+\.")
TOWER = "re:.*visual\\."  # the vision tower, which is small compared with the language model


@dataclass(frozen=True, slots=True)
class Cost:
    """The relative error of a module's weights: the norm of the error over the norm of the weights."""

    error: float
    num_values: int


@dataclass
class Quantized:
    """A checkpoint that is rounded as it is read, and the errors of what has been read so far, by module."""

    checkpoint: Checkpoint
    errors: dict[str, Cost] = field(default_factory=dict)
    latest: "_RoundedWeight | None" = None  # whose tensors are in memory


def quantized(checkpoint: Checkpoint, model: Any, scheme: str, ignore: Sequence[str] = ()) -> Quantized:
    """Return the checkpoint with weights rounded by `scheme`. model: the checkpoint's model on "meta", which lists its
    matrices. ignore: modules to leave as they are, by name, or "re:" and a regular expression.

    Some schemes round the head, too. A tied embedding is then read twice: for the head, and in bf16 for lookups.
    Raises ValueError if the weights are already quantised or none are left to be quantised.
    """
    if checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config"):
        raise ValueError(f"{checkpoint.path}: the weights are already quantised; give the original model")
    kept = [name for name in KEPT if name != _HEAD or not formats.rounder(scheme).rounds_head]
    ignored = [*kept, *([] if getattr(model, "tower", None) is None else [TOWER]), *ignore]
    if scheme not in formats.SCHEME_NAMES:  # what no checkpoint is written in lists all that it leaves by name
        ignored = ignore = _left(model, scheme, ignored)
    shapes = _chosen(checkpoint, model, scheme, ignored)
    columns = {name: columns for name, (_, columns) in shapes.items()}
    blocks = getattr(model, "block_scales", None)
    rounding, of_head = (formats.rounding_to(scheme, columns, blocks, is_head=is_head) for is_head in (False, True))
    if rounding.takes_patterns:  # layers that the model does not load stay as they are
        left = [*ignored, *(f"re:{re.escape(layer)}" for layer in getattr(model, "ignored_layers", ()))]
    else:
        shapes |= _further_layers(checkpoint, model, shapes, ignored)
        left = [name for name in _matrices(model, scheme) if _is_matched(name, ignore)]
    config = {**checkpoint.config, "quantization_config": rounding.settings(left)}
    result = Quantized(checkpoint)
    sources: dict[str, Source] = {}
    for name, source in checkpoint.sources.items():
        module = name.removesuffix(".weight")
        if module == name or module not in shapes:
            sources[name] = source
            continue
        if module.endswith(_EMBEDDING):
            sources[name] = source  # read again, for lookups
        own = of_head if module.endswith((_HEAD, _EMBEDDING)) else rounding
        weight = _RoundedWeight(module, source, own, result)
        tensors = own.shapes(*shapes[module])
        sources |= {f"{module}.{end}": weight.source(end, shape, dtype) for end, (shape, dtype) in tensors.items()}
    result.checkpoint = replace(checkpoint, config=config, sources=sources, packed=None)
    return result


def _chosen(checkpoint: Checkpoint, model: Any, scheme: str, ignored: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the matrices to quantise, with their shapes."""
    matrices = {name: shape for name, shape in _matrices(model, scheme).items() if not _is_matched(name, ignored)}
    stored = {name: shape for name, shape in matrices.items() if f"{name}.weight" in checkpoint.sources}
    if (missing := next((name for name in matrices if ".experts." in name and name not in stored), None)) is not None:
        raise ValueError(
            f"{checkpoint.path}: {missing}.weight is missing: experts in one tensor cannot be quantised; leave them "
            "as they are with --ignore 're:.*experts'"
        )
    if not stored:
        raise ValueError(f"{checkpoint.path}: nothing is left to be quantised: ignored are {', '.join(ignored)}")
    return stored


def _left(model: Any, scheme: str, ignored: Sequence[str]) -> list[str]:
    """Return the names of the matrices that a scheme which takes no patterns leaves as they are."""
    shapes = _matrices(model, scheme)
    unfit = set(formats.rounder(scheme).unfit({name: columns for name, (_, columns) in shapes.items()}))
    return [name for name in shapes if name in unfit or _is_matched(name, ignored)]


def _further_layers(
    checkpoint: Checkpoint, model: Any, shapes: dict[str, tuple[int, int]], ignored: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return matrices of layers that the model does not load, such as multi-token prediction: those that other layers
    have as well, because published files have them in the same format."""
    inside = {_LAYER.sub("", name) for name in shapes if _LAYER.match(name)}
    names = (f"{layer}{name}" for layer in getattr(model, "ignored_layers", ()) for name in sorted(inside))
    sources = {name: checkpoint.sources.get(f"{name}.weight") for name in names if not _is_matched(name, ignored)}
    return {name: (source.shape[0], source.shape[1]) for name, source in sources.items() if source is not None}


def _is_matched(name: str, ignored: Sequence[str]) -> bool:
    return any(pattern.match(name) for pattern in _compiled(tuple(ignored)))


@functools.cache
def _compiled(names: tuple[str, ...]) -> list["re.Pattern[str]"]:
    patterns = []
    for name in names:
        try:
            patterns.append(re.compile(name[3:] if name.startswith("re:") else f"{re.escape(name)}$"))
        except re.error as error:
            raise ValueError(f"ignore: {name!r} is not a regular expression: {error}") from error
    return patterns


def _matrices(model: Any, scheme: str) -> dict[str, tuple[int, int]]:
    """Return the shape of every matrix that `scheme` may round, by its name in the checkpoint: all but the embedding,
    unless it is the head, too, and the scheme rounds heads."""
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, Matrix)}
    shapes = {part.source(name): part.shape for name, matrix in matrices.items() for part in matrix.parts}
    is_tied = not any(name.endswith(_HEAD) for name in shapes)
    rounder = formats.rounder(scheme)
    has_embedding = rounder.rounds_embedding or (rounder.rounds_head and is_tied)
    return {name: shape for name, shape in shapes.items() if has_embedding or not name.endswith(_EMBEDDING)}


class _RoundedWeight:
    """The tensors that a module's weight is rounded to, held until another one is rounded."""

    def __init__(self, name: str, weight: Source, rounding: Any, result: Quantized) -> None:
        self.name, self.weight, self.rounding, self.result = name, weight, rounding, result
        self._ends: dict[str, Tensor] = {}

    def source(self, end: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Source:
        kind = dtype or self.weight.gives or torch.float32
        text = str(kind).removeprefix("torch.")
        size = prod(shape) * kind.itemsize
        return Source(shape=shape, dtype=text, gives=kind, nbytes=size, read=lambda index: self._read(end, index))

    def _read(self, end: str, index: Index) -> Tensor:
        if end not in self._ends:
            self._round()
        return self._ends[end][index]

    def _round(self) -> None:
        if self.result.latest is not None:
            self.result.latest._ends = {}
        self.result.latest = self
        weight = self.weight.read((slice(None), slice(None)))
        try:
            self._ends, squared_error, squared_norm = self.rounding.apply(weight)
        except ValueError as error:
            raise ValueError(f"{self.name}.weight {error}") from error
        relative = (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0
        self.result.errors[self.name] = Cost(relative, weight.numel())
