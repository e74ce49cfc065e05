"""Passes that decide where the rows of all ranks are gathered: a minimum cut, then folding and quantising.

A *root* is an all-gather with which a region of row-wise operators begins: `split_all_reduces` made it from an
all-reduce, or the model itself has it. A *shard* is a rank's rows of a value.
"""

from typing import Any

import torch
from torch.fx import Node

from whorl import collectives

from .layout import group_of, ours
from .placement import Region, explain_cut, find_region, minimum_cut, row_bytes
from .rewriting import Rewrite
from .rows import LOCAL_ROWS, Features, Rows, has_shape_of, label, product, same, value

aten = torch.ops.aten


def place_gathers(state: Rewrite) -> int:
    """Move every root behind row-wise operators, to where the fewest bytes must be gathered.

    Returns how many operators now run on a rank's rows alone.
    """
    todo = list(state.roots)
    count = 0
    while todo:
        state.infer_layouts()
        tokens = value(todo[0]).shape[0]
        roots = [r for r in todo if same(value(r).shape[0], tokens)]
        todo = [r for r in todo if r not in roots]
        region = find_region(state.graph, tokens, roots, state.layouts, state.group)
        count += _place(state, region)
    return count


def gathered_row_bytes(state: Rewrite, node: Node, lead: int) -> int:
    """Return the bytes of one row of `node` if it were gathered there, quantised where that is allowed."""
    plain = row_bytes(node, lead)
    if node in state.roots:  # gathered where it was summed, it becomes an all-reduce again, which never quantises
        return plain
    return min(plain, _quantized_bytes(node, lead)) if _may_quantize(state, node, lead) else plain


def _quantized_bytes(node: Node, lead: int) -> int:
    return int(product(value(node).shape[lead:])) + collectives.SCALE_BYTES


def _may_quantize(state: Rewrite, node: Node, lead: int) -> bool:
    """Return whether a gather may be quantised: not what the graph returns, nor short rows such as routing weights."""
    if state.config.quantize is None or "quantize" in state.config.skip:
        return False
    fake = value(node)
    is_long = int(product(fake.shape[lead:])) >= collectives.MIN_QUANTIZED
    is_wide = fake.is_floating_point() and fake.element_size() in (2, 4)
    return is_long and is_wide and not _is_returned(node)


def _is_returned(node: Node) -> bool:
    return any(u.op == "output" or (u.target is aten.reshape.default and _is_returned(u)) for u in node.users)


def _place(state: Rewrite, region: Region) -> int:
    """Cut one region and write the nodes before the cut on a rank's rows. Returns how many operators these are."""
    cut = minimum_cut(region, lambda node, lead: gathered_row_bytes(state, node, lead))
    local_nodes = set(cut.local)
    unchanged = [r for r in region.roots if r in cut.gathered and not _has_local_users(r, region, local_nodes)]
    for root in unchanged:
        state.reasons[root] = f"nothing to gain: {explain_cut(root, region, local_nodes - {root})}"
    local = [n for n in cut.local if n not in unchanged]
    if local:
        _RowWriter(state, region, set(local)).emit(set(cut.gathered) - set(unchanged))
    state.local_roots |= {r for r in region.roots if r in local}
    count = sum(n not in region.roots for n in local)
    state.report.local_operators += count
    return count


def _has_local_users(node: Node, region: Region, local: set[Node]) -> bool:
    return any(u in local or u in region.local_rows for u in node.users)


class _RowWriter:
    """Writes those nodes of a region that run on a rank's rows (`local`) into the graph.

    shards: the node on a rank's rows of each local node; sliced: this rank's rows of operands that ranks have in full.
    """

    def __init__(self, state: Rewrite, region: Region, local: set[Node]) -> None:
        self.state, self.region, self.local = state, region, local
        self.edit, self.group = state.editor, state.group
        self.rows = collectives.rows_per_rank(region.tokens, state.size)
        self.shards: dict[Node, Node] = {}
        self.sliced: dict[Any, Node] = {}

    def emit(self, gathered: set[Node]) -> None:
        """Write the local nodes, gather those in `gathered`, and erase the nodes that they replace."""
        graph = self.state.graph
        order = [n for n in graph.nodes if n in self.local or n in self.region.local_rows]
        for node in order:
            with graph.inserting_before(node):
                if node in self.region.local_rows:
                    self._replace_local_rows(node)
                    continue
                self.shards[node] = self._shard(node)
                if node in gathered:
                    self._gather(node)
        for node in reversed(order):
            if not node._erased and not node.users:
                graph.erase_node(node)

    def _shard(self, node: Node) -> Node:
        """Return the node on a rank's rows: what a root gathers, or a new node by the plan."""
        if node in self.region.roots:
            return node.args[0]  # type: ignore[return-value]
        plan = self.region.plans[node]
        arguments = torch.fx.node.map_aggregate((plan.args, dict(plan.kwargs)), self._argument)
        if plan.is_gemm:
            self.state.report.gemms.append(node.name)
        return self.edit.local(plan.target or node.target, arguments[0], arguments[1], node, plan.lead, self.rows)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Rows):
            return self.shards.get(argument.node) or self._slice(argument)
        if isinstance(argument, Features):
            return self.edit.reshape(argument.node, value(argument.node).shape[argument.lead :])
        return self.shards.get(argument, argument) if isinstance(argument, Node) else argument

    def _slice(self, operand: Rows) -> Node:
        """Return this rank's rows of an operand that every rank has in full."""
        key = (operand.node, operand.lead, operand.tokens is None)
        if key not in self.sliced:
            full, features = operand.node, tuple(value(operand.node).shape[operand.lead :])
            token_dims = operand.lead
            if operand.tokens is not None:
                sizes = [self.edit.size(s) for s in (*operand.tokens, *features)]
                full, token_dims = self.edit.call(aten.expand.default, full, sizes), len(operand.tokens)
            if token_dims > 1:
                full = self.edit.reshape(full, (self.region.tokens, *features))
            self.sliced[key] = self.edit.call(ours.local_rows.default, full, self.group, like=operand.node)
            self.state.report.sliced.append(label(operand.node))
        return self.sliced[key]

    def _gather(self, node: Node) -> None:
        """Gather the shard of a local node for the readers that need all rows; a root is a gather already."""
        edit, lead = self.edit, self.region.shardable[node]
        reason = explain_cut(node, self.region, self.local)
        if node in self.region.roots:
            self.state.placed[node] = (row_bytes(node, 1), reason)
            return
        shard = self.shards[node]
        full = edit.call(ours.all_gather.default, shard, edit.size(self.region.tokens), self.group, like=node)
        self.state.placed[full] = (row_bytes(full, 1), reason)
        if lead != 1:
            full = edit.reshape(full, value(node).shape, like=node)
        node.replace_all_uses_with(
            full, delete_user_cb=lambda u: u not in self.local and u not in self.region.local_rows
        )

    def _replace_local_rows(self, node: Node) -> None:
        """Replace a node that takes this rank's rows of a sharded value by the shard itself.

        The padding rows of the node's output are zero, so those of the shard are set to zero where they may not be.
        """
        source: Any = node.args[0]
        if source not in self.shards:
            return
        shard = self.shards[source]
        is_clean = shard.target in (ours.ordered_reduce_scatter.default, ours.local_rows.default)
        if not is_clean and not same(self.region.tokens % self.state.size, 0):
            shard = self.edit.call(
                ours.zero_padding.default, shard, self.edit.size(self.region.tokens), self.group, like=node
            )
        node.replace_all_uses_with(shard)


def quantize_gathers(state: Rewrite) -> int:
    """Replace gathers by gathers in 8 bits with a scale per row, where that moves fewer bytes.

    Only gathers that `place_gathers` made are replaced. Returns how many were.
    """
    if state.config.quantize is None:
        return 0
    count = 0
    for node in [n for n in state.placed if not n._erased and _is_gather(n, state.group)]:
        num_bytes = _quantized_bytes(node, 1)
        if not _may_quantize(state, node, 1) or num_bytes >= row_bytes(node, 1):
            continue
        reason = state.placed[node][1]
        with state.graph.inserting_before(node):
            quantized = state.editor.call(
                ours.all_gather_quantized.default, *node.args, state.config.quantize, like=node
            )
        _replace(state, node, quantized)
        state.placed[quantized] = (num_bytes, reason)
        count += 1
    state.report.is_quantized = count > 0
    return count


def fold(state: Rewrite) -> int:
    """Undo gathers that nothing was moved across: all_gather(reduce_scatter(x)) becomes all_reduce(x).

    A rank's rows of a gather become the shard that the rank put in. Returns how many pairs were folded.
    """
    count = 0
    for node in list(state.graph.nodes):
        source: Any = node.args[0] if node.args else None
        if node.target in LOCAL_ROWS and _is_gather(source, state.group) and group_of(node) == state.group:
            _skip_gather(state, node, source)
            count += 1
    for node in list(state.graph.nodes):
        source = node.args[0] if node.args else None
        is_pair = _is_gather(node, state.group) and source.target is ours.ordered_reduce_scatter.default
        if is_pair and len(source.users) == 1 and has_shape_of(node, source.args[0]):
            with state.graph.inserting_before(node):
                reduced = state.editor.call(ours.ordered_all_reduce.default, source.args[0], state.group, like=node)
            _replace(state, node, reduced)
            state.graph.erase_node(source)
            count += 1
    return count


def _is_gather(node: Any, group: str) -> bool:
    return isinstance(node, Node) and node.target is ours.all_gather.default and group_of(node) == group


def _skip_gather(state: Rewrite, local_rows: Node, gather: Node) -> None:
    """Replace this rank's rows of a gather by the shard that was gathered."""
    shard: Any = gather.args[0]
    with state.graph.inserting_before(local_rows):
        if shard.target is not ours.ordered_reduce_scatter.default:
            shard = state.editor.call(ours.zero_padding.default, shard, gather.args[1], state.group, like=local_rows)
    local_rows.replace_all_uses_with(shard)
    state.graph.erase_node(local_rows)
    state.local_roots |= {gather} & set(state.roots)
    if not gather.users:
        state.graph.erase_node(gather)


def _replace(state: Rewrite, old: Node, new: Node) -> None:
    """Replace `old` by `new` in the graph and in the tables of the rewrite."""
    old.replace_all_uses_with(new)
    tables: list[dict[Node, Any]] = [state.roots, state.kinds, state.reasons, state.placed]
    for table in tables:
        if old in table:
            table[new] = table.pop(old)
    if old in state.local_roots:
        state.local_roots.remove(old)
        state.local_roots.add(new)
    state.graph.erase_node(old)
