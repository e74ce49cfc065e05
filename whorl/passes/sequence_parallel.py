"""The first passes of sequence parallelism. Each takes the state of a rewrite, changes its graph and returns a count.

Every all-reduce becomes a reduce-scatter and an all-gather; the passes in `gathers` then move the all-gathers to where
the fewest bytes cross.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from whorl import collectives

from .editor import Editor
from .layout import ALL_REDUCES, REDUCE_SCATTERS, Layout, c10d, group_of, ours, waiting_node
from .report import Collective, module_path, source_line
from .rewriting import Rewrite
from .rows import VIEWS, example, has_shape_of, is_tensor, product, same, value

aten = torch.ops.aten
_SAME_SHAPE = VIEWS | {aten.expand.default, aten.slice.Tensor, aten.squeeze.default}
# They replace the first argument entirely if the second has its shape.
_OVERWRITES = {aten.copy.default, aten.slice_scatter.default}
_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}


def eliminate_noops(state: Rewrite) -> int:
    """Drop operators that change nothing, and read sizes from the graph's inputs.

    A size read from a later value would keep that value from being sharded. Returns how many nodes changed.
    """
    count = 0
    for node in list(state.graph.nodes):
        source: Any = node.args[0] if node.args else None
        if node.target is aten.sym_size.int and source.op != "placeholder" and state.editor.knows(value(node)):
            size = state.editor.size(value(node))
            node.replace_all_uses_with(size)
            state.graph.erase_node(node)
            count += 1
    return count + drop_noops(state.graph)


def drop_noops(graph: Graph) -> int:
    """Drop aliases, copies over a full value, and views, slices and expansions to the same shape; join chains of views.

    Only what changes nothing for any size is dropped, so no guard is added. Returns how many nodes were.
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


def _find_equal(node: Node) -> Any:
    """Return the node that already has the value of `node`, or None."""
    source: Any = node.args[0] if node.args else None
    if not is_tensor(node) or not is_tensor(source):
        return None
    if node.target in _OVERWRITES:
        return node.args[1] if _has_strides_of(node, node.args[1]) else None
    is_same = node.target in _ALIASES or (node.target in _SAME_SHAPE and has_shape_of(node, source))
    return source if is_same else None


def _has_strides_of(node: Node, other: Any) -> bool:
    """Return whether both nodes have the same shape, strides, dtype and device."""
    if not is_tensor(other) or not has_shape_of(node, other):
        return False
    a, b = value(node), value(other)
    is_same_kind = a.dtype == b.dtype and a.device == b.device
    return is_same_kind and all(same(x, y) for x, y in zip(a.stride(), b.stride(), strict=True))


def infer_layouts(state: Rewrite) -> int:
    """Infer the layout of every value. Returns how many values are not equal on all ranks."""
    state.infer_layouts()
    return sum(layout is not Layout.REPLICATED for layout in state.layouts.values())


# ---- splitting


def order_sum(editor: Editor, node: Node, group: str) -> bool:
    """Replace torch's sum over the group by one in rank order. Returns whether it was replaced.

    The sum of a scalar has no rows to share and stays as it is.
    """
    is_sum = node.target is c10d.all_reduce.default and node.args[1] == "sum" and group_of(node) == group
    out = waiting_node(node) if is_sum else None
    if out is None or not value(out).dim():
        return False
    with editor.graph.inserting_before(out):
        ordered = editor.call(ours.ordered_all_reduce.default, node.args[0], group, like=node)
    out.replace_all_uses_with(ordered)
    editor.graph.erase_node(out)
    editor.graph.erase_node(node)
    return True


def other_rows(rows: Any, tokens: Any, size: int) -> int | None:
    """Return the number of rows at capture, or None if they are the graph's tokens, with or without padding."""
    pairs = ((rows, tokens), (tokens, rows))
    is_filled = any(same(a, size * collectives.rows_per_rank(b, size)) for a, b in pairs)
    return None if is_filled or same(rows, tokens) else example(rows)


def _describe(
    state: Rewrite, node: Node, kind: str, *, rewritten: bool, reason: str, lead: int | None = None
) -> Collective:
    """Describe a collective for the report; lead: its row dims, by default all but the last, or the only one."""
    reduced = value(node.args[0]) if kind in ("reduce_scatter", "all_to_all") else value(node)
    lead = max(reduced.dim() - 1, min(reduced.dim(), 1)) if lead is None else lead
    rows, tokens, group = product(reduced.shape[:lead]), state.gm.meta["tokens"], group_of(node)
    # An all-gather of features has every token once per rank.
    copies = state.size if kind == "all_gather" and same(rows, state.size * tokens) else 1
    features = product(reduced.shape[lead:])
    return Collective(
        kind=kind,
        module=module_path(node),
        source=source_line(node),
        shape=str(list(reduced.shape)),
        row_bytes=copies * features * reduced.element_size() if isinstance(features, int) else 0,
        rewritten=rewritten,
        reason=reason,
        rows=None if copies > 1 else other_rows(rows, tokens, state.size),
        size=None if group in (None, state.group) else collectives.group_size(str(group)),
    )


def split_all_reduces(state: Rewrite) -> int:
    """Replace every all-reduce by an all-gather of a reduce-scatter; returns how many.

    All-gathers that the model itself has are brought into the same form, so that they can be moved as well.
    """
    count = 0
    for node in list(state.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ALL_REDUCES:
            count += _split(state, node)
        elif node.target in (c10d.all_gather_into_tensor.default, ours.all_gather.default):
            _adopt_gather(state, node)
        elif node.target in _LEFT_ALONE:
            kind, reason = _LEFT_ALONE[node.target]
            state.left_alone.append(_describe(state, node, kind, rewritten=False, reason=reason))
    return count


_LEFT_ALONE: dict[Any, tuple[str, str]] = {
    **dict.fromkeys(
        REDUCE_SCATTERS, ("reduce_scatter", "the model itself scatters here, and each rank has its rows after it")
    ),
    c10d.all_to_all_single.default: (
        "all_to_all",
        "it exchanges rows between ranks: neither a sum nor a gather of rows",
    ),
}


def _sum_refusal(state: Rewrite, node: Node, out: Node | None) -> str | None:
    """Return why an all-reduce cannot be split, or None."""
    if group_of(node) != state.group:
        return f"it is over group {group_of(node)!r}, not {state.group!r}"
    if out is None:
        return "its result is not waited for exactly once"
    if node.target is c10d.all_reduce.default and node.args[1] != "sum":
        return f"it reduces by {node.args[1]!r}, not 'sum'"
    if value(out).dim() < 2:
        return f"its result has the shape {list(value(out).shape)}: no rows of features"
    if not isinstance(value(out).shape[-1], int):
        return "the size of its feature dim is not a constant"
    return _row_refusal(state, product(value(out).shape[:-1]))


def _row_refusal(state: Rewrite, tokens: Any) -> str | None:
    if not state.editor.knows(tokens):
        return f"its number of rows, {tokens}, is known only from data"
    if not state.config.pad and isinstance(tokens, int) and tokens % state.size:
        return f"{tokens} rows do not divide evenly over {state.size} ranks, and pad is off"
    return None


def _split(state: Rewrite, node: Node) -> int:
    out = node if node.target is ours.ordered_all_reduce.default else waiting_node(node)
    reason = _sum_refusal(state, node, out)
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
    """Make the model's own all-gather of rows a root, together with the slice behind it that cuts off padding."""
    is_ours = node.target is ours.all_gather.default
    out = node if is_ours else waiting_node(node)
    shard: Any = node.args[0]
    if shard in state.roots:
        return
    reason = _gather_refusal(state, node, out)
    if reason is not None or out is None:
        state.left_alone.append(_describe(state, node, "all_gather", rewritten=False, reason=reason or "", lead=1))
        return
    if is_ours:
        state.roots[node], state.kinds[node] = shard, "all_gather"
        return
    end = _trimming_slice(out, value(shard).shape[0], state.size) or out
    tokens = value(end).shape[0]
    with state.graph.inserting_before(out):
        root = state.editor.call(ours.all_gather.default, shard, state.editor.size(tokens), state.group, like=node)
    for old in (end, out, node):
        if not old._erased:
            old.replace_all_uses_with(root)
            state.graph.erase_node(old)
    state.roots[root], state.kinds[root] = shard, "all_gather"


def _gather_refusal(state: Rewrite, node: Node, out: Node | None) -> str | None:
    """Return why a gather of the model cannot be moved, or None."""
    if group_of(node) != state.group:
        return f"it is over group {group_of(node)!r}, not {state.group!r}"
    if out is None:
        return "its result is not waited for exactly once"
    if value(out).dim() < 2:
        return f"its result has the shape {list(value(out).shape)}: no rows of features"
    if not all(isinstance(size, int) for size in value(out).shape[1:]):
        return "it gathers no rows: the sizes of its dims after the first are not constants"
    return _row_refusal(state, value(out).shape[0])


def _trimming_slice(out: Node, rows: Any, size: int) -> Node | None:
    """Return the slice [:tokens] that cuts off the padding of a gather, or None.

    It must be the only reader of the gather, and ranks must hold ceil(tokens / size) rows each.
    """
    users = list(out.users)
    if len(users) != 1 or users[0].target is not aten.slice.Tensor:
        return None
    cut: Any = users[0]
    # slice(input, dim=0, start=None, end=None, step=1): arguments that are left out have their defaults.
    dim, start, step = (*cut.args[1:3], *(None,) * 3)[:2] + ((*cut.args[4:5], 1)[0],)
    is_rows = dim in (0, None) and start in (0, None) and step == 1
    return cut if is_rows and same(rows, collectives.rows_per_rank(value(cut).shape[0], size)) else None
