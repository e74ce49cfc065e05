"""Rewrite updates of the rows that a mask selects as updates of all rows.

`h[mask] = h[mask] + e`, as transformers adds Qwen3-VL's vision embeddings, works on a tensor of the selected rows,
which cannot be sharded as the rows of h are. `where(mask, h + spread(e), h)`, where spread(e) has each row of e at its
place among all rows, gives the same bits, works row by row, and has no size that depends on data.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .editor import Editor, erase
from .rewriting import Rewrite
from .rows import is_pointwise, is_tensor, label, same, value

aten = torch.ops.aten


def spread_masks(state: Rewrite) -> int:
    """Rewrite updates of the rows that a mask selects, h[mask] = ... and masked_scatter, as updates of all rows.

    Returns how many were rewritten.
    """
    count, editor = 0, state.editor
    for node in list(editor.graph.nodes):
        new = None
        with editor.graph.inserting_before(node):
            if node.target is aten.index_put.default:
                new = _spread_rows(editor, node)
            elif node.target is aten.masked_scatter.default:
                new = _spread_elements(editor, node)
        if new is not None:
            node.replace_all_uses_with(new)
            erase(node)
            count += 1
    for node in list(editor.graph.nodes) if count else ():
        if node.target is aten.index.Tensor and _row_mask(node) is not None and _is_only_counted(node):
            _count_mask(editor, node)
    return count


def _is_only_counted(node: Node) -> bool:
    """Return whether only the number of selected rows is read, as an assertion of the model does."""
    return bool(node.users) and all(u.target is aten.sym_size.int and u.args[1] == 0 for u in node.users)


def _count_mask(editor: Editor, node: Node) -> None:
    """Count the selected elements of the mask itself instead of the selected rows; the numbers are equal."""
    mask: Any = _row_mask(node)
    with editor.graph.inserting_before(node):
        count = editor.graph.call_function(aten.index.Tensor, (mask, [mask]))
    count.meta = {k: v for k, v in node.meta.items() if k != "val"}  # keeps the binding of the size symbol as well
    count.meta["val"] = editor.empty(value(node).shape[:1], like=mask)
    node.replace_all_uses_with(count)
    erase(node)


def _row_mask(node: Node) -> Node | None:
    """Return the mask over leading dims by which a node reads or writes its first argument, or None."""
    indices: Any = node.args[1]
    mask, other_indices = indices[0], indices[1:]
    if not is_tensor(mask) or value(mask).dtype != torch.bool or any(i is not None for i in other_indices):
        return None
    sizes: Any = value(node.args[0]).shape  # type: ignore[arg-type]
    return mask if all(same(a, b) for a, b in zip(value(mask).shape, sizes, strict=False)) else None


def _spread_rows(editor: Editor, node: Node) -> Node | None:
    rows: Any = node.args[0]
    mask = _row_mask(node)
    if mask is None or (node.args[3:] or (False,))[0]:  # index_put that accumulates
        return None
    updated = _Spread(editor, mask, value(rows).dim()).over_all_rows(node.args[2])
    selected = mask
    for _ in range(value(rows).dim() - value(mask).dim()):
        selected = editor.call(aten.unsqueeze.default, selected, -1, like=node)
        selected.meta["whorl_name"] = label(mask)
    return editor.call(aten.where.self, selected, updated, rows, like=node)


def _spread_elements(editor: Editor, node: Node) -> Node:
    target, mask, source = node.args
    zeros = _zeros(editor, value(target).shape, like=source)
    filled = editor.call(aten.masked_scatter.default, zeros, mask, source, like=node)
    return editor.call(aten.where.self, mask, filled, target, like=node)


def _zeros(editor: Editor, sizes: Sequence[Any], like: Any) -> Node:
    kind = {"dtype": value(like).dtype, "device": value(like).device}
    return editor.call(aten.full.default, [editor.size(s) for s in sizes], 0, like=like, kwargs=kind)


class _Spread:
    """Turns values [selected rows, ...] into values over all rows.

    What stands in the rows that are not selected is never read.
    """

    def __init__(self, editor: Editor, mask: Node, dims: int) -> None:
        self.editor, self.mask = editor, mask
        self.features = dims - value(mask).dim()
        self.spread: dict[Node, Any] = {}

    def over_all_rows(self, x: Any) -> Any:
        """Return x over all rows; x itself if it has no row dim."""
        if not is_tensor(x) or value(x).dim() <= self.features:  # it has no row dim: every row reads the same
            return x
        if x not in self.spread:
            self.spread[x] = self._spread(x)
        return self.spread[x]

    def _spread(self, x: Node) -> Any:
        if self._is_selected(x):
            return x.args[0]
        if is_pointwise(x.target) and any(self._follows_selected(a) for a in x.all_input_nodes):
            args, kwargs = torch.fx.node.map_aggregate((x.args, x.kwargs), self.over_all_rows)
            return self.editor.call(x.target, *args, kwargs=kwargs, like=x)  # type: ignore[arg-type]
        zeros = _zeros(self.editor, (*value(self.mask).shape, *value(x).shape[1:]), like=x)
        filled = self.editor.call(aten.index_put.default, zeros, [self.mask], x, like=x)
        filled.meta["whorl_name"] = f"{label(x)} where {label(self.mask)}"
        return filled

    def _is_selected(self, x: Node) -> bool:
        return x.target is aten.index.Tensor and _row_mask(x) is self.mask

    def _follows_selected(self, x: Node) -> bool:
        if self._is_selected(x):
            return True
        return is_pointwise(x.target) and any(self._follows_selected(a) for a in x.all_input_nodes)
