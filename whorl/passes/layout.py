"""Infer the layout of each value of a graph over one process group: replicated, sharded, partial or varying."""

from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from whorl import collectives

from .rows import LOCAL_ROWS, is_registered

c10d = torch.ops._c10d_functional
ours = torch.ops.whorl  # whorl's own operators

ALL_REDUCES = {c10d.all_reduce.default, ours.ordered_all_reduce.default}
REDUCE_SCATTERS = {c10d.reduce_scatter_tensor.default, ours.ordered_reduce_scatter.default}
ALL_GATHERS = {
    c10d.all_gather_into_tensor.default,
    ours.all_gather.default,
    ours.all_gather_quantized.default,
}
# Collectives after which every rank has the same value.
REPLICATING = ALL_REDUCES | ALL_GATHERS | {c10d.broadcast.default}
# Operators of these namespaces depend on their arguments alone; operators of others may read the rank.
PURE = ("aten", "prims", "whorl", "_operator", "math", "torch")


class Layout(Enum):
    """How a value lies across the ranks of a group.

    REPLICATED: equal on all ranks. PARTIAL: each rank has one summand. SHARDED: each rank has its rows. VARYING: not
    known to be any of these.
    """

    REPLICATED = "replicated"
    PARTIAL = "partial"
    SHARDED = "sharded"
    VARYING = "varying"


def group_of(node: Node) -> str | None:
    """Return the name of the group that a collective works over; None for other nodes."""
    is_ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("_c10d_functional", "whorl")
    if not is_ours:
        return None
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in ("group", "group_name"):
            return str(node.args[i] if i < len(node.args) else node.kwargs[argument.name])
    return None


def waiting_node(node: Node) -> Node | None:
    """Return the node that waits for a functional collective and holds its result; None if there is not exactly one."""
    waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
    return waits[0] if len(waits) == 1 and len(node.users) == 1 else None


def covers(wide: str | None, group: str) -> bool:
    """Return whether every rank of `group` takes part in one collective over `wide`."""
    if wide is None or wide == group:
        return wide == group
    ranks = [set(dist.get_process_group_ranks(collectives.process_group(g))) for g in (wide, group)]
    return ranks[1] <= ranks[0]


def infer(graph: Graph, group: str, inputs: Mapping[str, Layout], differing: Set[str]) -> dict[Node, Layout]:
    """Return the layout of every node.

    inputs: layouts of placeholders by name; those not named are REPLICATED. differing: names of nodes with constants or
    shapes that are not the same on all ranks.
    """
    layouts: dict[Node, Layout] = {}
    for node in graph.nodes:
        if node.name in differing:
            layouts[node] = Layout.VARYING
        elif node.op in ("placeholder", "get_attr"):
            layouts[node] = inputs.get(node.name, Layout.REPLICATED)
        else:
            layouts[node] = _layout(node, group, layouts)
    # A varying value that is only summed over the group is partial.
    for node in reversed(graph.nodes):
        users = list(node.users)
        if layouts[node] is Layout.VARYING and users and all(_sums_over(u, group) for u in users):
            layouts[node] = Layout.PARTIAL
    return layouts


def _sums_over(node: Node, group: str) -> bool:
    if node.target not in ALL_REDUCES | REDUCE_SCATTERS or group_of(node) != group:
        return False
    return (
        node.target in (ours.ordered_all_reduce.default, ours.ordered_reduce_scatter.default) or node.args[1] == "sum"
    )


def _layout(node: Node, group: str, known: Mapping[Node, Layout]) -> Layout:
    target: Any = node.target
    layouts = [known[a] for a in node.all_input_nodes]
    if target in REPLICATING and covers(group_of(node), group):
        return Layout.REPLICATED
    if target in REDUCE_SCATTERS | LOCAL_ROWS:
        return Layout.SHARDED if group_of(node) == group else Layout.VARYING
    if target is c10d.wait_tensor.default:
        return layouts[0]
    inner = node.args[0] if isinstance(target, torch._ops.HigherOrderOperator) and node.args else None
    if not _is_pure(inner if isinstance(inner, torch._ops.OpOverload) else target):
        return Layout.VARYING
    if all(layout is Layout.REPLICATED for layout in layouts):
        return Layout.REPLICATED
    is_rows = all(layout in (Layout.REPLICATED, Layout.SHARDED) for layout in layouts) and is_registered(target)
    return Layout.SHARDED if is_rows else Layout.VARYING


def _is_pure(target: Any) -> bool:
    if is_registered(target):
        return True
    if isinstance(target, torch._ops.OpOverload):
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace in PURE and not is_random
    return isinstance(target, torch._ops.HigherOrderOperator) or getattr(target, "__module__", "") in PURE
