"""Choose where rows are gathered: a minimum cut through the operators that could run on a rank's rows alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from .layout import Layout
from .rows import LOCAL_ROWS, Plan, is_tensor, label, plan_for, product, same, value

# Weight of a byte that crosses the cut. A gather itself weighs 1, so that of two cuts with equal bytes the one with
# fewer messages wins. Weights are integers, so that every rank computes the same cut.
BYTE = 1024


@dataclass(slots=True)
class Region:
    """The values that could be sharded by rows: the roots and what is computed from them row by row.

    tokens: the number of rows, the same for all. roots: the all-gathers with which the region begins. shardable: the
    number of leading token dims of each value. plans: how each node but the roots would run on a rank's rows.
    """

    tokens: Any
    roots: list[Node]
    shardable: dict[Node, int] = field(default_factory=dict)
    plans: dict[Node, Plan] = field(default_factory=dict)
    local_rows: list[Node] = field(default_factory=list)  # nodes that take a rank's rows of a shardable value
    misses: dict[Node, str] = field(default_factory=dict)  # consumers that need all rows, and why


def find_region(graph: Graph, tokens: Any, roots: list[Node], layouts: Mapping[Node, Layout], group: str) -> Region:
    """Collect the region behind `roots`: every node that could run on a rank's rows, or the reason why it cannot."""
    region = Region(tokens, roots, shardable=dict.fromkeys(roots, 1))
    for node in graph.nodes:
        if node in region.shardable or not any(a in region.shardable for a in node.all_input_nodes):
            continue
        if node.op == "output":
            region.misses[node] = "the graph returns it, and outputs are not sharded"
        elif _takes_local_rows(node, group, region.shardable):
            region.local_rows.append(node)
        else:
            plan = _plan(node, region, layouts)
            if isinstance(plan, str):
                region.misses[node] = plan
            else:
                region.shardable[node], region.plans[node] = plan.lead, plan
    return region


def _takes_local_rows(node: Node, group: str, shardable: Mapping[Node, int]) -> bool:
    source: Any = node.args[0] if node.args else None
    return node.target in LOCAL_ROWS and group in node.args and shardable.get(source) == 1


def _plan(node: Node, region: Region, layouts: Mapping[Node, Layout]) -> Plan | str:
    """Return how a node runs on a rank's rows, or the reason why it cannot."""
    for argument in node.all_input_nodes:
        layout = layouts.get(argument)
        if argument not in region.shardable and layout is not Layout.REPLICATED:
            return f"its operand {label(argument)} is {layout.value if layout else 'unknown'}"
    if layouts.get(node) is not Layout.REPLICATED:
        return "it does not compute the same on all ranks"
    plan = plan_for(node, region.shardable, region.tokens)
    if isinstance(plan, str):
        return plan
    for output in value(node) if isinstance(value(node), tuple | list) else [value(node)]:
        if not isinstance(output, Tensor) or output.dim() < plan.lead:
            return "an output has no token dims"
        if not same(product(output.shape[: plan.lead]), region.tokens):
            return "an output has another number of rows"
        if not all(isinstance(size, int) for size in output.shape[plan.lead :]):
            return "the sizes of its feature dims are not constants"
    return plan


def row_bytes(node: Node, lead: int) -> int:
    """Return the bytes of one row of a node with `lead` token dims."""
    fake = value(node)
    return int(product(fake.shape[lead:])) * int(fake.element_size())


@dataclass(frozen=True, slots=True)
class Cut:
    """The nodes that run on a rank's rows, and those of them that are gathered, in graph order."""

    local: list[Node]
    gathered: list[Node]


def minimum_cut(region: Region, moved: Callable[[Node, int], int]) -> Cut:
    """Return the cut that moves the fewest bytes; of several equal cuts the latest.

    moved: a function of (node, lead) that returns the bytes of one row of a gather there. The earliest and the latest
    of equal cuts are unique whatever the algorithm, so all ranks agree. With the latest, the most operators run on a
    rank's rows.
    """
    import networkx

    flow = networkx.DiGraph()
    for node in region.shardable:
        capacity = {"capacity": moved(node, region.shardable[node]) * BYTE + 1} if is_tensor(node) else {}
        flow.add_edge((node.name, "in"), (node.name, "out"), **capacity)
        if node in region.roots:
            flow.add_edge("start", (node.name, "in"))
        for user in node.users:
            if user in region.shardable:
                flow.add_edge((node.name, "out"), (user.name, "in"))
            elif user not in region.local_rows:
                flow.add_edge((node.name, "out"), "end")
    if "end" not in flow:
        return Cut(list(region.shardable), [])
    needs_all = _reaching_end(networkx.algorithms.flow.shortest_augmenting_path(flow, "start", "end"))
    local = [n for n in region.shardable if (n.name, "in") not in needs_all]
    return Cut(local, [n for n in local if (n.name, "out") in needs_all])


def _reaching_end(residual: Any) -> set[Any]:
    """Return the nodes from which more could flow to the end: the smallest side of a minimum cut that has the end."""
    reaching, todo = {"end"}, ["end"]
    while todo:
        node = todo.pop()
        for before in residual.predecessors(node):
            edge = residual[before][node]
            if before not in reaching and edge["flow"] < edge["capacity"]:
                reaching.add(before)
                todo.append(before)
    return reaching


def explain_cut(node: Node, region: Region, local: Iterable[Node]) -> str:
    """Return in words why the gather of `node` stands where it is."""
    local_nodes = set(local)
    for user in node.users:
        if user in region.misses:
            return f"{user.name}: {region.misses[user]}"
    for user in node.users:
        if user not in local_nodes:
            return f"fewer bytes here than behind {user.name}"
    return "every consumer needs all rows"
