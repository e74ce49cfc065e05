"""Find the layouts of the inputs of a captured graph.

They follow from `SequenceParallel.sharded`, from DTensor placements, or from comparing the inputs on all ranks.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whorl import collectives

from . import agree
from .config import SequenceParallel
from .layout import Layout
from .pipeline import matches, warn_of_unmatched


class Input(NamedTuple):
    """The model's name of an input and its layout.

    unproven: it held one repeated value when it was compared, so equality proved nothing.
    """

    name: str
    layout: Layout
    unproven: bool = False


def input_layouts(gm: GraphModule, config: SequenceParallel) -> list[Input]:
    """Return name and layout of each input of a graph from Dynamo.

    An input that `config.sharded` names is VARYING; a DTensor is REPLICATED if its placements are, else VARYING; other
    tensors are compared on all ranks if `config.probe` is set. Everything else is REPLICATED.
    """
    group = collectives.group_name(config.group)
    tensors: dict[str, Any] = {}
    layouts: dict[str, Layout] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        argument = node.meta.get("grapharg")
        name = _source_name(argument, node)
        example: Any = None if argument is None else argument.example
        if matches(name, config.sharded):
            layouts[node.name] = Layout.VARYING
        elif hasattr(example, "placements"):
            is_replicated = all(p.is_replicate() for p in example.placements)
            layouts[node.name] = Layout.REPLICATED if is_replicated else Layout.VARYING
        elif isinstance(example, Tensor) and config.probe:
            tensors[node.name] = example
        else:
            layouts[node.name] = Layout.REPLICATED
    layouts |= agree.probe(tensors, group) if config.probe else {}
    names = {node.name: _source_name(node.meta.get("grapharg"), node) for node in placeholders}
    warn_of_unmatched(config, list(names.values()))
    unproven = {n for n, x in tensors.items() if layouts[n] is Layout.VARYING and agree.is_one_value(x)}
    return [Input(name, layouts[node], node in unproven) for node, name in names.items()]


def _source_name(argument: Any, node: Node) -> str:
    """Return the model's name of an input.

    `layers.0.up.weight` for L['self']._modules['layers']._modules['0']._modules['up']._parameters['weight'].
    """
    source = getattr(argument, "source", None)
    if source is None:
        return node.name
    name = source.name() if callable(source.name) else source.name
    inside = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", name)
    outside = re.findall(r"L\['([^']+)'\]((?:\.\w+)*)$", name)
    return ".".join(inside) or "".join("".join(part) for part in outside) or node.name


def name_inputs(gm: GraphModule, inputs: list[Input]) -> dict[str, Layout]:
    """Return the layouts of the traced graph's inputs, and store the model's name of each in its node.

    An input that the graph writes to is VARYING: that it was equal on all ranks once does not prove that it stays so.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    mutated = set(metadata.mutated_inp_runtime_indices) if metadata is not None else set()
    layouts = {}
    for i, node in enumerate(placeholders):
        index = _input_index(node.meta.get("desc"))
        index = i if index is None and len(placeholders) == len(inputs) else index
        unknown = Input(node.name, Layout.VARYING)
        name, layout, unproven = Input(*inputs[index]) if index is not None and index < len(inputs) else unknown
        node.meta["whorl_name"], node.meta["whorl_unproven"] = name, unproven
        layouts[node.name] = Layout.VARYING if i in mutated else layout
    return layouts


def _input_index(description: Any) -> int | None:
    """Return the index of the captured input that a traced input is, or is a part of (a DTensor's local tensor)."""
    while description is not None and not hasattr(description, "idx"):
        description = getattr(description, "base", None)
    return getattr(description, "idx", None)
