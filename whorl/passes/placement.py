"""Where rows come together again: a minimum cut through the operators that could run on a rank's rows alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from .layout import Layout
from .rows import CHUNKS, Plan, is_tensor, label, plan_for, product, same, value

# A byte that crosses the cut weighs so much; what is left of a unit counts gathers, so that of two cuts with equal
# bytes the one with fewer messages wins. Whole numbers: every rank finds the same cut.
BYTE = 1024


@dataclass(slots=True)
class Region:
    """What could be held as rows, from gathers of one number of tokens onward."""

    tokens: Any
    roots: list[Node]
    held: dict[Node, int] = field(default_factory=dict)
    plans: dict[Node, Plan] = field(default_factory=dict)
    chunks: list[Node] = field(default_factory=list)  # take a rank's rows of a held value
    misses: dict[Node, str] = field(default_factory=dict)  # consumers that need all rows, and why


def find_region(graph: Graph, tokens: Any, roots: list[Node], layouts: Mapping[Node, Layout], group: str) -> Region:
    region = Region(tokens, roots, held=dict.fromkeys(roots, 1))
    for node in graph.nodes:
        if node in region.held or not any(a in region.held for a in node.all_input_nodes):
            continue
        if node.op == "output":
            region.misses[node] = "the graph returns it, and outputs are whole"
        elif _is_chunk(node, group, region.held):
            region.chunks.append(node)
        else:
            plan = _plan(node, region, layouts)
            if isinstance(plan, str):
                region.misses[node] = plan
            else:
                region.held[node], region.plans[node] = plan.lead, plan
    return region


def _is_chunk(node: Node, group: str, held: Mapping[Node, int]) -> bool:
    source: Any = node.args[0] if node.args else None
    return node.target in CHUNKS and group in node.args and held.get(source) == 1


def _plan(node: Node, region: Region, layouts: Mapping[Node, Layout]) -> Plan | str:
    for argument in node.all_input_nodes:
        layout = layouts.get(argument)
        if argument not in region.held and layout is not Layout.REPLICATED:
            return f"its operand {label(argument)} is {layout.value if layout else 'unknown'}"
    if layouts.get(node) is not Layout.REPLICATED:
        return "it does not do the same on all ranks"
    plan = plan_for(node, region.held, region.tokens)
    if isinstance(plan, str):
        return plan
    for found in value(node) if isinstance(value(node), tuple | list) else [value(node)]:
        if not isinstance(found, Tensor) or found.dim() < plan.lead:
            return "an output has no rows"
        if not same(product(found.shape[: plan.lead]), region.tokens):
            return "an output has other rows"
        if not all(isinstance(size, int) for size in found.shape[plan.lead :]):
            return "its feature dims are not known numbers"
    return plan


def row_bytes(node: Node, lead: int) -> int:
    found = value(node)
    return int(product(found.shape[lead:])) * int(found.element_size())


@dataclass(frozen=True, slots=True)
class Cut:
    """Nodes computed on a rank's rows, and those of them that are gathered, in graph order."""

    local: list[Node]
    gathered: list[Node]


def minimum_cut(region: Region, moved: Callable[[Node, int], int]) -> Cut:
    """The cut that moves the fewest bytes, `moved(node, lead)` for a row of a node; of several the latest.

    Both ends of the choice between equal cuts (the earliest, the latest) are unique whatever the algorithm, so ranks
    agree. The latest has the most operators running on a share of the rows.
    """
    import networkx

    flow = networkx.DiGraph()
    for node in region.held:
        capacity = {"capacity": moved(node, region.held[node]) * BYTE + 1} if is_tensor(node) else {}
        flow.add_edge((node.name, "in"), (node.name, "out"), **capacity)
        if node in region.roots:
            flow.add_edge("start", (node.name, "in"))
        for user in node.users:
            if user in region.held:
                flow.add_edge((node.name, "out"), (user.name, "in"))
            elif user not in region.chunks:
                flow.add_edge((node.name, "out"), "end")
    if "end" not in flow:
        return Cut(list(region.held), [])
    needs_all = _reaching_end(networkx.algorithms.flow.shortest_augmenting_path(flow, "start", "end"))
    local = [n for n in region.held if (n.name, "in") not in needs_all]
    return Cut(local, [n for n in local if (n.name, "out") in needs_all])


def _reaching_end(residual: Any) -> set[Any]:
    """Nodes from which more could flow to the end: the smallest side of a minimum cut that holds the end."""
    found, todo = {"end"}, ["end"]
    while todo:
        node = todo.pop()
        for before in residual.predecessors(node):
            edge = residual[before][node]
            if before not in found and edge["flow"] < edge["capacity"]:
                found.add(before)
                todo.append(before)
    return found


def why_cut(node: Node, region: Region, local: Iterable[Node]) -> str:
    """What comes behind a gather, in words."""
    kept = set(local)
    for user in node.users:
        if user in region.misses:
            return f"{user.name}: {region.misses[user]}"
    for user in node.users:
        if user not in kept:
            return f"fewer bytes here than behind {user.name}"
    return "every consumer needs all rows"
