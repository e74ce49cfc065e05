"""The pass that fuses a collective with the matmul before or after it into one operator that overlaps them.

    mm -> reduce_scatter      matmul_reduce_scatter       sequence parallelism
    all_gather -> mm          all_gather_matmul           sequence parallelism; several matmuls may share a gather
    mm -> all_reduce          matmul_all_reduce           tensor parallelism alone

Where the platform has a fused operator (CUDA's symmetric memory, Ascend) it is used, unless sums must be in rank order.
Elsewhere the matmul is split by rank: one part is sent while the next is computed. Then sums are in rank order, as in
`collectives`, and the result has the bits of the unfused pair wherever a row of a matmul's result does not depend on
the rows beside it: always with whorl's `linear`, and with aten's `mm` where the library guarantees it. The code calls
both kinds of matmul a product.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from whorl.ops import linear

from .editor import erase
from .fused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .layout import group_of, waiting_node
from .rows import VIEWS, has_shape_of

c10d = torch.ops._c10d_functional
ours = torch.ops.whorl  # whorl's own operators
# Fuses one collective (graph, node, ordered); returns None, or the reason why it did not.
Fuser = Callable[[Graph, Node, bool], str | None]


def fuse_graph(graph: Graph, group: str, *, ordered: bool = True, left: list[str] | None = None) -> int:
    """Fuse the matmuls of `graph` with the collectives over `group` that they feed or read, in place.

    ordered: sums of whorl's own collectives stay in rank order; those of torch's functional collectives never are.
    left: a list to which a line is appended for every collective over the group that is not fused, with the reason.
    Returns how many collectives were fused.
    """
    left = [] if left is None else left
    count = 0
    for node in list(graph.nodes):
        if node.target not in _FUSERS or group_of(node) != group:
            continue
        reason = _FUSERS[node.target](graph, node, ordered)
        count += reason is None
        if reason is not None:
            left.append(f"{node.name}: {reason}")
    graph.lint()
    return count


def _product(node: Any) -> tuple[Node, Node, str] | None:
    """Return input, weight and kind ("mm" or "linear") of a plain matmul; None for any other node.

    A plain matmul has no bias and no forced backend, because the fused operators have neither.
    """
    if not isinstance(node, Node):
        return None
    arguments: Any = node.args
    if node.target is torch.ops.aten.mm.default:
        return arguments[0], arguments[1], "mm"
    if node.target is linear.node:
        bias = arguments[2] if len(arguments) > 2 else node.kwargs.get("bias")
        is_plain = bias is None and not node.kwargs.get("backend")
        return (arguments[0], arguments[1], "linear") if is_plain else None
    return None


def _before_views(node: Any) -> Any:
    """Return the value that `node` is a view of, if the views keep its shape and nothing else reads them."""
    source = node
    while isinstance(source, Node) and source.target in VIEWS and len(source.users) == 1:
        source = source.args[0]
    return source if isinstance(source, Node) and has_shape_of(source, node) else node


def _find_products(value: Node) -> list[Node]:
    """Return the plain matmuls that read `value`, directly or through views that keep its shape."""
    products, todo = [], list(value.users)
    while todo:
        user = todo.pop(0)
        product = _product(user)
        if product is not None and has_shape_of(product[0], value) and _skip_views(product[0]) is value:
            products.append(user)
        elif user.target in VIEWS:
            todo += list(user.users)
    return products


def _skip_views(node: Any) -> Any:
    while isinstance(node, Node) and node.target in VIEWS:
        node = node.args[0]
    return node


def _result(node: Node) -> Node | None:
    """Return the node that holds a collective's result: the collective itself, or the node that waits for it."""
    return node if _is_ours(node) else waiting_node(node)


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "whorl"


def _replace(old: Node, new: Node) -> None:
    new.meta.update({k: v for k, v in old.meta.items() if k not in new.meta})
    old.replace_all_uses_with(new)
    erase(old)


def _fuse_sum(target: Any) -> Fuser:
    """Return the Fuser of a matmul and the reduce-scatter or all-reduce behind it; target: the fused operator."""

    def fuse_one(graph: Graph, node: Node, ordered: bool) -> str | None:
        if not _is_ours(node) and node.args[1] != "sum":
            return f"it reduces by {node.args[1]!r}, not 'sum'"
        source, out = _before_views(node.args[0]), _result(node)
        parts = _product(source)
        if parts is None:
            return "its input is not a plain matmul (no bias, no forced backend)"
        if len(source.users) > 1 or out is None:
            return "the matmul's result, or the collective before it is waited for, is read elsewhere too"
        x, weight, product = parts
        with graph.inserting_before(out):
            new = graph.call_function(target, (x, weight, group_of(node), ordered and _is_ours(node), product))
        _replace(out, new)
        return None

    return fuse_one


def _fuse_gather(graph: Graph, node: Node, ordered: bool) -> str | None:
    """Fuse an all-gather with all matmuls that read it; a `Fuser`."""
    out = _result(node)
    products = [] if out is None else _find_products(out)
    kinds = {parts[2] for p in products if (parts := _product(p))}
    if out is None or len(kinds) != 1:
        return "matmuls of several kinds read it" if kinds else "no plain matmul reads it"
    arguments: Any = node.args
    tokens: Any = arguments[1] if _is_ours(node) else out.meta["val"].shape[0]
    if isinstance(tokens, torch.SymInt):
        return "its number of rows is a symbol, and only whorl's all_gather takes a symbol"
    format = arguments[3] if _is_ours(node) and len(arguments) > 3 else ""
    weights = [parts[1] for p in products if (parts := _product(p))]
    place = _hoist(graph, weights, out)
    if place is None:
        return "a weight depends on what is gathered"
    with graph.inserting_after(place):
        fused = graph.call_function(
            all_gather_matmul._opoverload, (arguments[0], weights, tokens, group_of(node), format, kinds.pop())
        )
    place = fused
    outputs = []
    for i in range(1 + len(products)):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (fused, i))
        outputs.append(place)
    fused.meta = {k: v for k, v in out.meta.items() if k != "val"} | {
        "val": [p.meta.get("val") for p in (out, *products)]
    }
    for product, output in zip(products, outputs[1:], strict=True):
        _replace(product, output)
    if not out._erased:
        _replace(out, outputs[0])
    return None


def _hoist(graph: Graph, operands: Sequence[Node], place: Node) -> Node | None:
    """Move the nodes that `operands` are computed from to directly behind `place`.

    Returns the last node moved (`place` when none was), or None where one of them depends on `place` itself.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    todo, needed = list(operands), set()
    while todo:
        node = todo.pop()
        if node is place:
            return None
        if order[node] > order[place] and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    for node in sorted(needed, key=order.__getitem__):
        place.append(node)
        place = node
    return place


_FUSERS: dict[Any, Fuser] = {
    c10d.reduce_scatter_tensor.default: _fuse_sum(matmul_reduce_scatter._opoverload),
    ours.ordered_reduce_scatter.default: _fuse_sum(matmul_reduce_scatter._opoverload),
    c10d.all_reduce.default: _fuse_sum(matmul_all_reduce._opoverload),
    ours.ordered_all_reduce.default: _fuse_sum(matmul_all_reduce._opoverload),
    c10d.all_gather_into_tensor.default: _fuse_gather,
    ours.all_gather.default: _fuse_gather,
    ours.all_gather_quantized.default: _fuse_gather,
}
