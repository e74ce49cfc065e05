"""How the tensors of a model are made of those of a checkpoint, where their names or stacks differ.

A model class says it in `tensors`, a function of config.json's values and of the shapes in the checkpoint by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Shape = tuple[int, ...]
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class Made(NamedTuple):
    """A tensor of the model: a tensor of the checkpoint itself, or an entry of a stack, or made of several tensors."""

    shape: Shape
    sources: tuple[str, ...]  # their names in the checkpoint
    make: Callable[[list[Tensor]], Tensor] | None = None  # of all sources, in their order
    entry: tuple[int, int] | None = None  # which matrix of a stack [E, rows, columns], and the first of its rows


Tensors = Callable[[Mapping[str, Any], Mapping[str, Shape]], dict[str, Made]]


def renamed(*beginnings: tuple[str, str]) -> Tensors:
    """Return the `tensors` of a model whose names begin otherwise in some checkpoints: pairs of theirs and its own."""

    def name_of(name: str) -> str:
        old, new = next((pair for pair in beginnings if name.startswith(pair[0])), ("", ""))
        return new + name.removeprefix(old)

    return lambda values, shapes: {name_of(name): Made(shape, (name,)) for name, shape in shapes.items()}


def separated(values: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Made]:
    """Return each expert's matrices in place of the stacks gate_up_proj [E, 2 F, C] and down_proj [E, C, F].

    The same architecture is published both ways: plain weights often stacked, quantised ones never.
    """
    return {own: made for name, shape in shapes.items() for own, made in _separated(name, shape)}


def _separated(name: str, shape: Shape) -> Iterator[tuple[str, Made]]:
    is_gate_up = name.endswith(_GATE_UP)
    if len(shape) != 3 or not (is_gate_up or name.endswith(_DOWN)):
        yield name, Made(shape, (name,))
        return
    stack, (count, rows, columns) = name.rpartition(".")[0], shape
    parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)} if is_gate_up else {"down_proj": (0, rows)}
    for expert in range(count):
        for part, (first, end) in parts.items():
            yield f"{stack}.{expert}.{part}.weight", Made((end - first, columns), (name,), entry=(expert, first))
