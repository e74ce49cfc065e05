"""The tensors of a model, made of those of a checkpoint as `whorl.models.checkpoint_tensors` says."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import Tensor

from whorl.models.checkpoint_tensors import Made
from whorl.nn import Index

from .checkpoint import Source


def make(tensors: Mapping[str, Made], sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources of a model's tensors, by its names."""
    return {name: _source(made, [sources[each] for each in made.sources]) for name, made in tensors.items()}


def _source(made: Made, parts: list[Source]) -> Source:
    """Return the source of one tensor. parts: what it is made of."""
    if made.make is None and made.entry is None:
        return parts[0]

    def read_all(index: Index) -> Tensor:
        assert made.make is not None
        return made.make([part.read(tuple(slice(0, size) for size in part.shape)) for part in parts])[index]

    def read_rows(index: Index) -> Tensor:
        assert made.entry is not None
        entry, first = made.entry
        start, stop, _ = index[0].indices(made.shape[0])
        return parts[0].read((slice(entry, entry + 1), slice(first + start, first + stop), *index[1:]))[0]

    if made.make is not None:
        return replace(parts[0], shape=made.shape, nbytes=sum(part.nbytes for part in parts), read=read_all)
    share = parts[0].nbytes * prod(made.shape) // max(prod(parts[0].shape), 1)
    return replace(parts[0], shape=made.shape, nbytes=share, read=read_rows)
