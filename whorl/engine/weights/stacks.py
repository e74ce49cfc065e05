"""Experts that a checkpoint stores in two tensors per layer, for models that read every expert by itself.

The same architecture is published both ways: plain weights often stacked, quantised ones never.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from whorl.nn import Index

from .checkpoint import Source

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def separate(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources, with those of each expert in place of gate_up_proj [E, 2 F, C] and down_proj [E, C, F]."""
    return {new: part for name, source in sources.items() for new, part in _parts(name, source)}


def _parts(name: str, source: Source) -> Iterator[tuple[str, Source]]:
    is_gate_up = name.endswith(_GATE_UP)
    if len(source.shape) != 3 or not (is_gate_up or name.endswith(_DOWN)):
        yield name, source
        return
    stack, count, rows = name.rpartition(".")[0], source.shape[0], source.shape[1]
    parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)} if is_gate_up else {"down_proj": (0, rows)}
    for expert in range(count):
        for part, (first, end) in parts.items():
            yield f"{stack}.{expert}.{part}.weight", _rows(source, expert, first, end, share=count * len(parts))


def _rows(source: Source, expert: int, first: int, end: int, *, share: int) -> Source:
    """Return rows first to end (exclusive) of an expert. share: the parts of the whole stack, by which it counts."""

    def read(index: Index) -> Tensor:
        start, stop, _ = index[0].indices(end - first)
        return source.read((slice(expert, expert + 1), slice(first + start, first + stop), *index[1:]))[0]

    shape = (end - first, *source.shape[2:])
    return Source(shape=shape, dtype=source.dtype, gives=source.gives, nbytes=source.nbytes // share, read=read)
