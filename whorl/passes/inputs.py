"""Where the inputs of a captured graph live: by their placement, by name, or by comparing them on all ranks."""

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
    """What the model calls an input, and where it lives; unproven: it had one repeated value when it was compared."""

    name: str
    layout: Layout
    unproven: bool = False


def input_layouts(gm: GraphModule, config: SequenceParallel) -> list[Input]:
    """Of each input of a graph from Dynamo: by its placement, by name, or by comparing it on all ranks."""
    group = collectives.group_name(config.group)
    tensors: dict[str, Any] = {}
    found: dict[str, Layout] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        argument = node.meta.get("grapharg")
        name = _source_name(argument, node)
        example: Any = None if argument is None else argument.example
        if matches(name, config.sharded):
            found[node.name] = Layout.VARYING
        elif hasattr(example, "placements"):
            is_whole = all(p.is_replicate() for p in example.placements)
            found[node.name] = Layout.REPLICATED if is_whole else Layout.VARYING
        elif isinstance(example, Tensor) and config.probe:
            tensors[node.name] = example
        else:
            found[node.name] = Layout.REPLICATED
    found |= agree.probe(tensors, group) if config.probe else {}
    names = {node.name: _source_name(node.meta.get("grapharg"), node) for node in placeholders}
    warn_of_unmatched(config, list(names.values()))
    unproven = {n for n, x in tensors.items() if found[n] is Layout.VARYING and agree.is_one_value(x)}
    return [Input(name, found[node], node in unproven) for node, name in names.items()]


def _source_name(argument: Any, node: Node) -> str:
    """`layers.0.up.weight` of L['self']._modules['layers']._modules['0']._modules['up']._parameters['weight']."""
    source = getattr(argument, "source", None)
    if source is None:
        return node.name
    name = source.name() if callable(source.name) else source.name
    inside = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", name)
    outside = re.findall(r"L\['([^']+)'\]((?:\.\w+)*)$", name)
    return ".".join(inside) or "".join("".join(part) for part in outside) or node.name


def name_inputs(gm: GraphModule, inputs: list[Input]) -> dict[str, Layout]:
    """Layouts of the traced graph's inputs; each is given the model's name for it.

    What the graph writes to is not equal on all ranks for having been so once.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    mutated = set(metadata.mutated_inp_runtime_indices) if metadata is not None else set()
    found = {}
    for i, node in enumerate(placeholders):
        index = _input_index(node.meta.get("desc"))
        index = i if index is None and len(placeholders) == len(inputs) else index
        unknown = Input(node.name, Layout.VARYING)
        name, layout, unproven = Input(*inputs[index]) if index is not None and index < len(inputs) else unknown
        node.meta["whorl_name"], node.meta["whorl_unproven"] = name, unproven
        found[node.name] = Layout.VARYING if i in mutated else layout
    return found


def _input_index(description: Any) -> int | None:
    """The captured input that an input of the traced graph is, or is a part of (a DTensor's local tensor)."""
    while description is not None and not hasattr(description, "idx"):
        description = getattr(description, "base", None)
    return getattr(description, "idx", None)
