"""The tensors of a checkpoint under the names of transformers' model, for models that run through its code."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whorl.nn import Index

from .checkpoint import Source


def converted(values: Mapping[str, Any], sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources that transformers' model of a config.json has; some are put together of several."""
    from whorl.models.any_model.names import converted as conversions

    shapes = {name: source.shape for name, source in sources.items()}
    return {
        name: sources[each.sources[0]]
        if each.make is None
        else _together([sources[source] for source in each.sources], each.shape, each.make)
        for name, each in conversions(values, shapes).items()
    }


def _together(parts: list[Source], shape: tuple[int, ...], make: Any) -> Source:
    def read(index: Index) -> Tensor:
        whole: Tensor = make([part.read(tuple(slice(0, size) for size in part.shape)) for part in parts])
        return whole[index]

    first = parts[0]
    return Source(
        shape=shape, dtype=first.dtype, gives=first.gives, nbytes=sum(part.nbytes for part in parts), read=read
    )
