"""The passes of sequence parallelism. Each takes the state of a rewrite, changes its graph and returns a count.

Every all-reduce becomes a reduce-scatter and an all-gather; the gathers then move to where the fewest bytes cross.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from whorl import collectives

from . import layout, masks, noop
from .config import SequenceParallel
from .editor import Editor
from .layout import ALL_REDUCES, REDUCE_SCATTERS, Layout, c10d, group_of, ours
from .noop import has_shape_of
from .placement import Region, find_region, minimum_cut, row_bytes, why_cut
from .report import Collective, Report, module_path, source_line
from .rows import CHUNKS, Features, Rows, example, label, product, same, value

aten = torch.ops.aten
MIN_QUANTIZED = 64  # features of a row; shorter rows gain nothing beside their scale and a message


@dataclass(slots=True)
class Rewrite:
    """One graph on its way through the passes."""

    gm: GraphModule
    config: SequenceParallel
    group: str
    report: Report
    inputs: Mapping[str, Layout]
    differing: frozenset[str]
    editor: Editor
    layouts: dict[Node, Layout] = field(default_factory=dict)
    roots: dict[Node, Any] = field(default_factory=dict)  # gathers that stand for a captured collective, and its input
    kinds: dict[Node, Any] = field(default_factory=dict)
    reasons: dict[Node, Any] = field(default_factory=dict)  # why a root stays as it was
    left_alone: list[Collective] = field(default_factory=list)
    placed: dict[Node, Any] = field(default_factory=dict)  # gathers by placement: bytes of a row, and why
    local_roots: set[Node] = field(default_factory=set)

    @property
    def size(self) -> int:
        return self.report.size

    @property
    def graph(self) -> torch.fx.Graph:
        return self.gm.graph

    def infer_layouts(self) -> None:
        self.layouts = layout.infer(self.graph, self.group, self.inputs, self.differing)


def eliminate_noops(state: Rewrite) -> int:
    """Drop what does nothing; sizes are read from the graph's inputs, so that no value is kept whole for its size."""
    count = 0
    for node in list(state.graph.nodes):
        source: Any = node.args[0] if node.args else None
        if node.target is aten.sym_size.int and source.op != "placeholder" and state.editor.knows(value(node)):
            size = state.editor.size(value(node))
            node.replace_all_uses_with(size)
            state.graph.erase_node(node)
            count += 1
    return count + noop.eliminate_noops(state.graph)


def spread_masks(state: Rewrite) -> int:
    """Updates of the rows that a mask chooses become updates of all rows, so that a rank can do its share."""
    return masks.spread_masked_updates(state.editor)


def infer_layouts(state: Rewrite) -> int:
    """Counts the values that are not equal on all ranks."""
    state.infer_layouts()
    return sum(found is not Layout.REPLICATED for found in state.layouts.values())


# ---- splitting


def _waited(node: Node) -> Node | None:
    """The node that hands out a functional collective's result."""
    waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
    return waits[0] if len(waits) == 1 and len(node.users) == 1 else None


def order_sum(editor: Editor, node: Node, group: str) -> bool:
    """torch's sum over the group becomes one in rank order; a scalar's has no rows to share and stays."""
    is_sum = node.target is c10d.all_reduce.default and node.args[1] == "sum" and group_of(node) == group
    out = _waited(node) if is_sum else None
    if out is None or not value(out).dim():
        return False
    with editor.graph.inserting_before(out):
        ordered = editor.call(ours.ordered_all_reduce.default, node.args[0], group, like=node)
    out.replace_all_uses_with(ordered)
    editor.graph.erase_node(out)
    editor.graph.erase_node(node)
    return True


def other_rows(rows: Any, tokens: Any, size: int) -> int | None:
    """How many rows there were when captured, where they are not the graph's tokens, filled up or not."""
    pairs = ((rows, tokens), (tokens, rows))
    is_filled = any(same(a, size * collectives.rows_per_rank(b, size)) for a, b in pairs)
    return None if is_filled or same(rows, tokens) else example(rows)


def _describe(
    state: Rewrite, node: Node, kind: str, *, rewritten: bool, reason: str, lead: int | None = None
) -> Collective:
    """lead: dims of rows; by default all but the last, or the one there is."""
    found = value(node.args[0]) if kind in ("reduce_scatter", "all_to_all") else value(node)
    lead = max(found.dim() - 1, min(found.dim(), 1)) if lead is None else lead
    rows, tokens, group = product(found.shape[:lead]), state.gm.meta["tokens"], group_of(node)
    # A gather of features has the tokens once for every rank.
    times = state.size if kind == "all_gather" and same(rows, state.size * tokens) else 1
    features = product(found.shape[lead:])
    return Collective(
        kind=kind,
        module=module_path(node),
        source=source_line(node),
        shape=str(list(found.shape)),
        row_bytes=times * features * found.element_size() if isinstance(features, int) else 0,
        rewritten=rewritten,
        reason=reason,
        rows=None if times > 1 else other_rows(rows, tokens, state.size),
        size=None if group in (None, state.group) else collectives.group_size(str(group)),
    )


def split_all_reduces(state: Rewrite) -> int:
    """all_reduce = all_gather(reduce_scatter); gathers that the model has are brought into the same form."""
    count = 0
    for node in list(state.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ALL_REDUCES:
            count += _split(state, node)
        elif node.target in (c10d.all_gather_into_tensor.default, ours.all_gather.default):
            _adopt_gather(state, node)
        elif node.target in _OTHERS:
            kind, reason = _OTHERS[node.target]
            state.left_alone.append(_describe(state, node, kind, rewritten=False, reason=reason))
    return count


_OTHERS: dict[Any, tuple[str, str]] = {
    **dict.fromkeys(REDUCE_SCATTERS, ("reduce_scatter", "it is the model's own, and each rank has its rows behind it")),
    c10d.all_to_all_single.default: ("all_to_all", "it moves rows between ranks: neither a sum nor a gather of rows"),
}


def _refusal(state: Rewrite, node: Node, out: Node | None) -> str | None:
    if group_of(node) != state.group:
        return f"it is over group {group_of(node)!r}, asked for {state.group!r}"
    if out is None:
        return "its result is not waited for once"
    if node.target is c10d.all_reduce.default and node.args[1] != "sum":
        return f"it reduces by {node.args[1]!r}, not 'sum'"
    if value(out).dim() < 2:
        return f"its result has the shape {list(value(out).shape)}: no rows of features"
    if not isinstance(value(out).shape[-1], int):
        return "its feature dim is not a known number"
    return _refused_rows(state, product(value(out).shape[:-1]))


def _refused_rows(state: Rewrite, tokens: Any) -> str | None:
    if not state.editor.knows(tokens):
        return f"its number of rows, {tokens}, is known only from data"
    if not state.config.pad and isinstance(tokens, int) and tokens % state.size:
        return f"{state.size} ranks do not share {tokens} rows evenly, and pad is off"
    return None


def _split(state: Rewrite, node: Node) -> int:
    out = node if node.target is ours.ordered_all_reduce.default else _waited(node)
    reason = _refusal(state, node, out)
    if reason is not None or out is None:
        state.left_alone.append(_describe(state, node, "all_reduce", rewritten=False, reason=reason or ""))
        if state.config.ordered:
            order_sum(state.editor, node, state.group)
        return 0
    source: Any = node.args[0]
    shape, edit = value(out).shape, state.editor
    tokens = product(shape[:-1])
    with state.graph.inserting_before(out):
        flat = source if len(shape) == 2 else edit.reshape(source, (tokens, shape[-1]), like=node)
        shard = edit.call(ours.ordered_reduce_scatter.default, flat, state.group, like=node)
        root = full = edit.call(ours.all_gather.default, shard, edit.size(tokens), state.group, like=node)
        if len(shape) > 2:
            full = edit.reshape(root, shape, like=node)
    out.replace_all_uses_with(full)
    state.graph.erase_node(out)
    if out is not node:
        state.graph.erase_node(node)
    state.roots[root], state.kinds[root] = flat, "all_reduce"
    return 1


def _adopt_gather(state: Rewrite, node: Node) -> None:
    """The model's own gather of rows, with the slice behind it that cuts off padding."""
    is_ours = node.target is ours.all_gather.default
    out = node if is_ours else _waited(node)
    shard: Any = node.args[0]
    if shard in state.roots:
        return
    reason = _refused_gather(state, node, out)
    if reason is not None or out is None:
        state.left_alone.append(_describe(state, node, "all_gather", rewritten=False, reason=reason or "", lead=1))
        return
    if is_ours:
        state.roots[node], state.kinds[node] = shard, "all_gather"
        return
    end = _trimmed(out, value(shard).shape[0], state.size) or out
    tokens = value(end).shape[0]
    with state.graph.inserting_before(out):
        root = state.editor.call(ours.all_gather.default, shard, state.editor.size(tokens), state.group, like=node)
    for old in (end, out, node):
        if not old._erased:
            old.replace_all_uses_with(root)
            state.graph.erase_node(old)
    state.roots[root], state.kinds[root] = shard, "all_gather"


def _refused_gather(state: Rewrite, node: Node, out: Node | None) -> str | None:
    if group_of(node) != state.group:
        return f"it is over group {group_of(node)!r}, asked for {state.group!r}"
    if out is None:
        return "its result is not waited for once"
    if value(out).dim() < 2:
        return f"its result has the shape {list(value(out).shape)}: no rows of features"
    if not all(isinstance(size, int) for size in value(out).shape[1:]):
        return "it gathers no rows: what stands behind its first dim are not known numbers"
    return _refused_rows(state, value(out).shape[0])


def _trimmed(out: Node, rows: Any, size: int) -> Node | None:
    """The slice [:tokens] that is all that reads a gather, when ranks hold ceil(tokens / size) rows each."""
    users = list(out.users)
    if len(users) != 1 or users[0].target is not aten.slice.Tensor:
        return None
    cut: Any = users[0]
    dim, start, step = (*cut.args[1:3], *(None,) * 3)[:2] + ((*cut.args[4:5], 1)[0],)
    is_rows = dim in (0, None) and start in (0, None) and step == 1
    return cut if is_rows and same(rows, collectives.rows_per_rank(value(cut).shape[0], size)) else None


# ---- placement


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


# ---- after placement


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
