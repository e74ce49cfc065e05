"""A checkpoint as another one with fewer bits, whose tensors are rounded when they are read."""

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

# The head, the router and the weights of an indexer's heads: their errors cost most, and their bytes are few.
KEPT = ("lm_head", "re:.*mlp.gate$", "re:.*indexer.weights_proj$")
_LAYER = re.compile(r"model\.layers\.\d+\.")
TOWER = "re:.*visual\\."  # of a vision model: little beside its text


@dataclass(frozen=True, slots=True)
class Cost:
    """The error of a module's weights, relative to them: of the roots of the sums of squares."""

    error: float
    num_values: int


@dataclass
class Quantized:
    """A checkpoint that is rounded as it is read, and what that has cost so far, by module."""

    checkpoint: Checkpoint
    found: dict[str, Cost] = field(default_factory=dict)


def quantized(checkpoint: Checkpoint, model: Any, scheme: str, ignore: Sequence[str] = ()) -> Quantized:
    """model: of the checkpoint, on "meta", which knows its matrices. ignore: names, or "re:" and a pattern."""
    if checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config"):
        raise ValueError(f"{checkpoint.path}: the weights are quantised already: name the model as it was before")
    ignored = [*KEPT, *([] if getattr(model, "tower", None) is None else [TOWER]), *ignore]
    shapes = _chosen(checkpoint, model, ignored)
    columns = {name: columns for name, (_, columns) in shapes.items()}
    rounding = formats.rounding_to(scheme, columns, getattr(model, "block_scales", None))
    if rounding.takes_patterns:  # layers that the model leaves aside stay as they are
        left = [*ignored, *(f"re:{re.escape(layer)}" for layer in getattr(model, "ignored_layers", ()))]
    else:
        shapes |= _further_layers(checkpoint, model, shapes, ignored)
        left = [name for name in _matrices(model) if _is_matched(name, ignore)]
    config = {**checkpoint.config, "quantization_config": rounding.settings(left)}
    result = Quantized(checkpoint)
    sources: dict[str, Source] = {}
    for name, source in checkpoint.sources.items():
        module = name.removesuffix(".weight")
        if module == name or module not in shapes:
            sources[name] = source
            continue
        last = _Last(module, source, rounding, result)
        made = rounding.shapes(*shapes[module])
        sources |= {f"{module}.{end}": last.source(end, shape, dtype) for end, (shape, dtype) in made.items()}
    result.checkpoint = replace(checkpoint, config=config, sources=sources, packed=None)
    return result


def _chosen(checkpoint: Checkpoint, model: Any, ignored: Sequence[str]) -> dict[str, tuple[int, int]]:
    asked = {name: shape for name, shape in _matrices(model).items() if not _is_matched(name, ignored)}
    found = {name: shape for name, shape in asked.items() if f"{name}.weight" in checkpoint.sources}
    if (missing := next((name for name in asked if ".experts." in name and name not in found), None)) is not None:
        raise ValueError(
            f"{checkpoint.path}: {missing}.weight is not there: experts that lie in one tensor are not rounded here, "
            "and have one format: leave them as they are with --ignore 're:.*experts'"
        )
    if not found:
        raise ValueError(f"{checkpoint.path}: nothing is left to be quantised: ignored are {', '.join(ignored)}")
    return found


def _further_layers(
    checkpoint: Checkpoint, model: Any, shapes: dict[str, tuple[int, int]], ignored: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Of layers that the model leaves aside, as those of multi-token prediction: matrices that other layers have, too,
    which the makers' files have in the same format."""
    inside = {_LAYER.sub("", name) for name in shapes if _LAYER.match(name)}
    names = (f"{layer}{name}" for layer in getattr(model, "ignored_layers", ()) for name in sorted(inside))
    sources = {name: checkpoint.sources.get(f"{name}.weight") for name in names if not _is_matched(name, ignored)}
    return {name: (source.shape[0], source.shape[1]) for name, source in sources.items() if source is not None}


def _is_matched(name: str, ignored: Sequence[str]) -> bool:
    return any(pattern.match(name) for pattern in _compiled(tuple(ignored)))


@functools.cache
def _compiled(names: tuple[str, ...]) -> list["re.Pattern[str]"]:
    found = []
    for name in names:
        try:
            found.append(re.compile(name[3:] if name.startswith("re:") else f"{re.escape(name)}$"))
        except re.error as error:
            raise ValueError(f"ignore: {name!r} is no pattern: {error}") from error
    return found


def _matrices(model: Any) -> dict[str, tuple[int, int]]:
    """Every matrix but the embedding, by its name in the checkpoint."""
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, Matrix)}
    found = {part.source(name): part.shape for name, matrix in matrices.items() for part in matrix.parts}
    return {name: shape for name, shape in found.items() if not name.endswith("embed_tokens")}


class _Last:
    """What a module's weight is rounded to, kept until all of it has been read."""

    def __init__(self, name: str, weight: Source, rounding: Any, into: Quantized) -> None:
        self.name, self.weight, self.rounding, self.into = name, weight, rounding, into
        self._ends: dict[str, Tensor] = {}

    def source(self, end: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Source:
        kind = dtype or self.weight.gives or torch.float32
        text = str(kind).removeprefix("torch.")
        size = prod(shape) * kind.itemsize
        return Source(shape=shape, dtype=text, gives=kind, nbytes=size, read=lambda index: self._read(end, index))

    def _read(self, end: str, index: Index) -> Tensor:
        if end not in self._ends:
            self._round()
        return self._ends.pop(end)[index]

    def _round(self) -> None:
        weight = self.weight.read((slice(None), slice(None)))
        try:
            self._ends, off, size = self.rounding.apply(weight)
        except ValueError as error:
            raise ValueError(f"{self.name}.weight {error}") from error
        self.into.found[self.name] = Cost((off / size) ** 0.5 if size else 0.0, weight.numel())
