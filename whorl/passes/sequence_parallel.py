"""The first passes of sequence parallelism. Each takes the state of a rewrite, changes its graph and returns a count.

Every all-reduce becomes a reduce-scatter and an all-gather; `gathers` then moves those to where the fewest bytes cross.
"""

from typing import Any

import torch
from torch.fx import Node

from whorl import collectives

from . import masks, noop
from .editor import Editor
from .layout import ALL_REDUCES, REDUCE_SCATTERS, Layout, c10d, group_of, ours
from .report import Collective, module_path, source_line
from .rewriting import Rewrite
from .rows import example, product, same, value

aten = torch.ops.aten


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
