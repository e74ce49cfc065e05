"""The pass that puts collectives into a graph which run while the product before or after them is computed.

    mm -> reduce_scatter      matmul_reduce_scatter       sequence parallelism
    all_gather -> mm          all_gather_matmul           sequence parallelism; several products may share a gather
    mm -> all_reduce          matmul_all_reduce           tensor parallelism alone

Where the platform has a fused operator (CUDA's symmetric memory, Ascend) it is used, unless sums must be in rank order;
elsewhere the product is cut by rank: one part is on its way while the next is multiplied. Then sums are in rank order,
as in `collectives`, and the result has the bits of the unfused pair wherever a row of a product does not depend on the
rows beside it: always with whorl's `linear`, with aten's `mm` where the library keeps to that.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from whorl.ops import linear

from .layout import group_of
from .noop import VIEWS, has_shape_of
from .overlapped import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .rewriting import Rewrite

c10d = torch.ops._c10d_functional
ours = torch.ops.whorl
Fuser = Callable[[Graph, Node, bool, bool], str | None]  # None, or why not


# ---- the operators


# ---- the pass


def fuse(state: Rewrite) -> int:
    """The pass of the pipeline, for those who ask for it."""
    return fuse_graph(state.graph, state.group, ordered=state.config.ordered)


def fuse_graph(
    graph: Graph, group: str, *, ordered: bool = True, exact: bool = False, left: list[str] | None = None
) -> int:
    """Fuse the products of `graph` with the collectives over `group` beside them. Returns how many collectives.

    ordered: the passes' own sums stay in rank order; torch's functional ones never are. exact: leave products alone
    that may change a row's bits when they are given other rows beside it. `left` is given a line for every collective
    over the group that stays as it is.
    """
    left = [] if left is None else left
    count = 0
    for node in list(graph.nodes):
        if node.target not in _FUSERS or group_of(node) != group:
            continue
        reason = _FUSERS[node.target](graph, node, ordered, exact)
        count += reason is None
        if reason is not None:
            left.append(f"{node.name}: {reason}")
    graph.lint()
    return count


NOT_EXACT = "rows of aten's mm may change with the rows beside them; whorl's linear keeps its bits"


def _product(node: Any) -> tuple[Node, Node, str] | None:
    """x, weight and kind of a plain product."""
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
    """What `node` is a view of, when all views together leave the shape and nothing else reads them."""
    source = node
    while isinstance(source, Node) and source.target in VIEWS and len(source.users) == 1:
        source = source.args[0]
    return source if isinstance(source, Node) and has_shape_of(source, node) else node


def _products_of(value: Node) -> list[Node]:
    """Plain products with `value`, as it is or through views that leave its shape."""
    found, todo = [], list(value.users)
    while todo:
        user = todo.pop(0)
        product = _product(user)
        if product is not None and has_shape_of(product[0], value) and _root(product[0]) is value:
            found.append(user)
        elif user.target in VIEWS:
            todo += list(user.users)
    return found


def _root(node: Any) -> Any:
    while isinstance(node, Node) and node.target in VIEWS:
        node = node.args[0]
    return node


def _result(node: Node) -> Node | None:
    """The node that hands out a collective's result: itself, or the one that waits for it."""
    if _is_ours(node):
        return node
    waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
    return waits[0] if len(waits) == len(node.users) == 1 else None


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "whorl"


def _replace(graph: Graph, old: Node, new: Node) -> None:
    new.meta.update({k: v for k, v in old.meta.items() if k not in new.meta})
    old.replace_all_uses_with(new)
    _erase(graph, old)


def _erase(graph: Graph, node: Any) -> None:
    """The node, and what only it read among views, products and the collective it waited for."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        is_ended = not source.users and (source.target in VIEWS or source.target in _FUSERS or _product(source))
        if is_ended:
            _erase(graph, source)


def _fuse_sum(target: Any) -> Fuser:
    def fuse_one(graph: Graph, node: Node, ordered: bool, exact: bool) -> str | None:
        if not _is_ours(node) and node.args[1] != "sum":
            return f"it reduces by {node.args[1]!r}, not 'sum'"
        source, out = _before_views(node.args[0]), _result(node)
        found = _product(source)
        if found is None:
            return "what it reduces is not a plain product"
        if len(source.users) > 1 or out is None:
            return "the product, or the sum before it is waited for, is read elsewhere too"
        x, weight, product = found
        if exact and product == "mm":
            return NOT_EXACT
        with graph.inserting_before(out):
            new = graph.call_function(target, (x, weight, group_of(node), ordered and _is_ours(node), product))
        _replace(graph, out, new)
        return None

    return fuse_one


def _fuse_gather(graph: Graph, node: Node, ordered: bool, exact: bool) -> str | None:
    out = _result(node)
    products = [] if out is None else _products_of(out)
    kinds = {what[2] for p in products if (what := _product(p))}
    if out is None or len(kinds) != 1:
        return "products of several kinds read it" if kinds else "no plain product reads it"
    if exact and "mm" in kinds:
        return NOT_EXACT
    arguments: Any = node.args
    tokens: Any = arguments[1] if _is_ours(node) else out.meta["val"].shape[0]
    if isinstance(tokens, torch.SymInt):
        return "its number of rows is a symbol, and it is not in the passes' own form"
    format = arguments[3] if _is_ours(node) and len(arguments) > 3 else ""
    weights = [what[1] for p in products if (what := _product(p))]
    place = _hoist(graph, weights, out)
    if place is None:
        return "a weight depends on what is gathered"
    with graph.inserting_after(place):
        both = graph.call_function(
            all_gather_matmul._opoverload, (arguments[0], weights, tokens, group_of(node), format, kinds.pop())
        )
    place = both
    pieces = []
    for i in range(1 + len(products)):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (both, i))
        pieces.append(place)
    both.meta = {k: v for k, v in out.meta.items() if k != "val"} | {
        "val": [p.meta.get("val") for p in (out, *products)]
    }
    for product, piece in zip(products, pieces[1:], strict=True):
        _replace(graph, product, piece)
    if not out._erased:
        _replace(graph, out, pieces[0])
    return None


def _hoist(graph: Graph, wanted: Sequence[Node], place: Node) -> Node | None:
    """Move what the wanted nodes are computed from to behind `place`: the last of them, None where that is a circle."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    todo, needed = list(wanted), set()
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
