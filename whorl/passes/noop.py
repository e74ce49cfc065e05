"""Drop operators that change nothing for any size; finding them adds no guard."""

from typing import Any

import torch
from torch.fx import Graph, Node

from .rows import is_tensor, same, value

aten = torch.ops.aten
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
SAME_SHAPE = VIEWS | {aten.expand.default, aten.slice.Tensor, aten.squeeze.default}
# They replace the first argument entirely if the second has its shape.
OVERWRITES = {aten.copy.default, aten.slice_scatter.default}
ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}


def has_shape_of(node: Node, other: Node) -> bool:
    """Return whether two nodes are known to have the same shape."""
    a, b = value(node), value(other)
    return len(a.shape) == len(b.shape) and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def _find_equal(node: Node) -> Any:
    """Return the node that already has the value of `node`, or None."""
    source: Any = node.args[0] if node.args else None
    if not is_tensor(node) or not is_tensor(source):
        return None
    if node.target in OVERWRITES:
        return node.args[1] if _has_strides_of(node, node.args[1]) else None
    is_same = node.target in ALIASES or (node.target in SAME_SHAPE and has_shape_of(node, source))
    return source if is_same else None


def _has_strides_of(node: Node, other: Any) -> bool:
    """Return whether both nodes have the same shape, strides, dtype and device."""
    if not is_tensor(other) or not has_shape_of(node, other):
        return False
    a, b = value(node), value(other)
    is_same_kind = a.dtype == b.dtype and a.device == b.device
    return is_same_kind and all(same(x, y) for x, y in zip(a.stride(), b.stride(), strict=True))


def eliminate_noops(graph: Graph) -> int:
    """Drop aliases, copies over a full value, and views, slices and expansions to the same shape; join chains of views.

    Returns how many nodes were dropped or joined.
    """
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
        equal = _find_equal(node)
        if equal is not None and not any(u.op == "output" for u in node.users):  # an output must not become an input
            node.replace_all_uses_with(equal)
            graph.erase_node(node)
            count += 1
    return count
