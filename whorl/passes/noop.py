"""Operators that do nothing, whatever the sizes: no guard is added to find out."""

from typing import Any

import torch
from torch.fx import Graph, Node

from .rows import is_tensor, same, value

aten = torch.ops.aten
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
SAME_SHAPE = VIEWS | {aten.expand.default, aten.slice.Tensor, aten.squeeze.default}
ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}


def has_shape_of(node: Node, other: Node) -> bool:
    a, b = value(node), value(other)
    return len(a.shape) == len(b.shape) and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def _does_nothing(node: Node) -> bool:
    source: Any = node.args[0] if node.args else None
    if not is_tensor(node) or not is_tensor(source):
        return False
    if node.target in ALIASES:
        return True
    return node.target in SAME_SHAPE and has_shape_of(node, source)


def eliminate_noops(graph: Graph) -> int:
    """Drop aliases, views, slices and expansions to the same shape; join chains of views. Returns how many."""
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        if node.target in VIEWS and isinstance(source, Node) and source.target in VIEWS:
            node.replace_input_with(source, source.args[0])  # type: ignore[arg-type]
            node.target = aten.reshape.default
            count += 1
            if not source.users:
                graph.erase_node(source)
        if _does_nothing(node) and not any(u.op == "output" for u in node.users):  # outputs may not become inputs
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
            count += 1
    return count
