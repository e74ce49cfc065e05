"""Where rows come together: gathers placed by the least cut, then folded or quantised."""

from typing import Any

import torch
from torch.fx import Node

from whorl import collectives

from .layout import group_of, ours
from .noop import has_shape_of
from .placement import Region, find_region, minimum_cut, row_bytes, why_cut
from .rewriting import Rewrite
from .rows import CHUNKS, Features, Rows, label, product, same, value

aten = torch.ops.aten
MIN_QUANTIZED = 64  # features of a row; shorter rows gain nothing beside their scale and a message


def place_gathers(state: Rewrite) -> int:
    """Move every gather behind the row-wise operators where the fewest bytes cross. Returns operators made local."""
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


def moved_bytes(state: Rewrite, node: Node, lead: int) -> int:
    plain = row_bytes(node, lead)
    if node in state.roots:  # gathered where it was summed it is an all-reduce again, which rounds nothing
        return plain
    return min(plain, _quantized_bytes(node, lead)) if _may_quantize(state, node, lead) else plain


def _quantized_bytes(node: Node, lead: int) -> int:
    return int(product(value(node).shape[lead:])) + collectives.SCALE_BYTES


def _may_quantize(state: Rewrite, node: Node, lead: int) -> bool:
    """Activations between layers; neither what the graph returns nor short rows such as routing weights."""
    if state.config.quantize is None or "quantize" in state.config.skip:
        return False
    found = value(node)
    is_long = int(product(found.shape[lead:])) >= MIN_QUANTIZED
    is_wide = found.is_floating_point() and found.element_size() in (2, 4)
    return is_long and is_wide and not _is_returned(node)


def _is_returned(node: Node) -> bool:
    return any(u.op == "output" or (u.target is aten.reshape.default and _is_returned(u)) for u in node.users)


def _place(state: Rewrite, region: Region) -> int:
    cut = minimum_cut(region, lambda node, lead: moved_bytes(state, node, lead))
    kept = set(cut.local)
    still = [r for r in region.roots if r in cut.gathered and not _has_local_users(r, region, kept)]
    for root in still:
        state.reasons[root] = f"nothing to gain: {why_cut(root, region, kept - {root})}"
    local = [n for n in cut.local if n not in still]
    if local:
        _Rows(state, region, set(local)).emit(set(cut.gathered) - set(still))
    state.local_roots |= {r for r in region.roots if r in local}
    count = sum(n not in region.roots for n in local)
    state.report.local_operators += count
    return count


def _has_local_users(node: Node, region: Region, kept: set[Node]) -> bool:
    return any(u in kept or u in region.chunks for u in node.users)


class _Rows:
    """Writes the local nodes of one region into the graph."""

    def __init__(self, state: Rewrite, region: Region, local: set[Node]) -> None:
        self.state, self.region, self.local = state, region, local
        self.edit, self.group = state.editor, state.group
        self.rows = collectives.rows_per_rank(region.tokens, state.size)
        self.shards: dict[Node, Node] = {}
        self.sliced: dict[Any, Node] = {}

    def emit(self, gathered: set[Node]) -> None:
        graph = self.state.graph
        order = [n for n in graph.nodes if n in self.local or n in self.region.chunks]
        for node in order:
            with graph.inserting_before(node):
                if node in self.region.chunks:
                    self._chunk(node)
                    continue
                self.shards[node] = self._shard(node)
                if node in gathered:
                    self._gather(node)
        for node in reversed(order):
            if not node._erased and not node.users:
                graph.erase_node(node)

    def _shard(self, node: Node) -> Node:
        if node in self.region.roots:
            return node.args[0]  # type: ignore[return-value]
        plan = self.region.plans[node]
        place = torch.fx.node.map_aggregate((plan.args, dict(plan.kwargs)), self._argument)
        if plan.is_gemm:
            self.state.report.gemms.append(node.name)
        return self.edit.local(plan.target or node.target, place[0], place[1], node, plan.lead, self.rows)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Rows):
            return self.shards.get(argument.node) or self._slice(argument)
        if isinstance(argument, Features):
            return self.edit.reshape(argument.node, value(argument.node).shape[argument.lead :])
        return self.shards.get(argument, argument) if isinstance(argument, Node) else argument

    def _slice(self, wanted: Rows) -> Node:
        """This rank's rows of an operand that every rank has whole."""
        key = (wanted.node, wanted.lead, wanted.tokens is None)
        if key not in self.sliced:
            full, features = wanted.node, tuple(value(wanted.node).shape[wanted.lead :])
            token_dims = wanted.lead
            if wanted.tokens is not None:
                sizes = [self.edit.size(s) for s in (*wanted.tokens, *features)]
                full, token_dims = self.edit.call(aten.expand.default, full, sizes), len(wanted.tokens)
            if token_dims > 1:
                full = self.edit.reshape(full, (self.region.tokens, *features))
            self.sliced[key] = self.edit.call(ours.local_rows.default, full, self.group, like=wanted.node)
            self.state.report.sliced.append(label(wanted.node))
        return self.sliced[key]

    def _gather(self, node: Node) -> None:
        edit, lead = self.edit, self.region.held[node]
        reason = why_cut(node, self.region, self.local)
        if node in self.region.roots:
            self.state.placed[node] = (row_bytes(node, 1), reason)
            return
        shard = self.shards[node]
        full = edit.call(ours.all_gather.default, shard, edit.size(self.region.tokens), self.group, like=node)
        self.state.placed[full] = (row_bytes(full, 1), reason)
        if lead != 1:
            full = edit.reshape(full, value(node).shape, like=node)
        node.replace_all_uses_with(full, delete_user_cb=lambda u: u not in self.local and u not in self.region.chunks)

    def _chunk(self, node: Node) -> None:
        """A rank's rows of what it holds as rows already; where there is padding it must read zero, as in a chunk."""
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
    """Gather activations in 8 bits with a scale a row; only gathers that placement made, and only where it is less."""
    if state.config.quantize is None:
        return 0
    count = 0
    for node in [n for n in state.placed if not n._erased and _is_gather(n, state.group)]:
        less = _quantized_bytes(node, 1)
        if not _may_quantize(state, node, 1) or less >= row_bytes(node, 1):
            continue
        reason = state.placed[node][1]
        with state.graph.inserting_before(node):
            packed = state.editor.call(ours.all_gather_quantized.default, *node.args, state.config.quantize, like=node)
        _rename(state, node, packed)
        state.placed[packed] = (less, reason)
        count += 1
    state.report.is_quantized = count > 0
    return count


def fold(state: Rewrite) -> int:
    """all_gather(reduce_scatter(x)) = all_reduce(x), and a rank's rows of a gather are what it gave."""
    count = 0
    for node in list(state.graph.nodes):
        source: Any = node.args[0] if node.args else None
        if node.target in CHUNKS and _is_gather(source, state.group) and group_of(node) == state.group:
            _skip_gather(state, node, source)
            count += 1
    for node in list(state.graph.nodes):
        source = node.args[0] if node.args else None
        is_pair = _is_gather(node, state.group) and source.target is ours.ordered_reduce_scatter.default
        if is_pair and len(source.users) == 1 and has_shape_of(node, source.args[0]):
            with state.graph.inserting_before(node):
                whole = state.editor.call(ours.ordered_all_reduce.default, source.args[0], state.group, like=node)
            _rename(state, node, whole)
            state.graph.erase_node(source)
            count += 1
    return count


def _is_gather(node: Any, group: str) -> bool:
    return isinstance(node, Node) and node.target is ours.all_gather.default and group_of(node) == group


def _skip_gather(state: Rewrite, chunk: Node, gather: Node) -> None:
    shard: Any = gather.args[0]
    with state.graph.inserting_before(chunk):
        if shard.target is not ours.ordered_reduce_scatter.default:
            shard = state.editor.call(ours.zero_padding.default, shard, gather.args[1], state.group, like=chunk)
    chunk.replace_all_uses_with(shard)
    state.graph.erase_node(chunk)
    state.local_roots |= {gather} & set(state.roots)
    if not gather.users:
        state.graph.erase_node(gather)


def _rename(state: Rewrite, old: Node, new: Node) -> None:
    """Put `new` in the place of `old`, also in what is known about it."""
    old.replace_all_uses_with(new)
    tables: list[dict[Node, Any]] = [state.roots, state.kinds, state.reasons, state.placed]
    for known in tables:
        if old in known:
            known[new] = known.pop(old)
    if old in state.local_roots:
        state.local_roots.remove(old)
        state.local_roots.add(new)
    state.graph.erase_node(old)
