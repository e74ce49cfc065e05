"""Updates of the rows that a mask chooses, written over all rows.

`h[mask] = h[mask] + e` (transformers adds Qwen3-VL's vision embeddings so) works on a tensor of the chosen rows, which
cannot be shared out as the rows of h are. `where(mask, h + spread(e), h)`, where e is spread over all rows, has the
same bits, works row by row, and has no size that depends on data.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .editor import Editor
from .rows import is_pointwise, is_tensor, label, same, value

aten = torch.ops.aten


def spread_masked_updates(editor: Editor) -> int:
    """Of h[mask] = ... and of masked_scatter. Returns how many."""
    count = 0
    for node in list(editor.graph.nodes):
        new = None
        with editor.graph.inserting_before(node):
            if node.target is aten.index_put.default:
                new = _of_rows(editor, node)
            elif node.target is aten.masked_scatter.default:
                new = _of_elements(editor, node)
        if new is not None:
            node.replace_all_uses_with(new)
            _erase(node)
            count += 1
    for node in list(editor.graph.nodes) if count else ():
        if node.target is aten.index.Tensor and _mask_of(node) is not None and _is_only_counted(node):
            _count_mask(editor, node)
    return count


def _is_only_counted(node: Node) -> bool:
    """How many rows were chosen is asserted, and nothing else of them is read."""
    return bool(node.users) and all(u.target is aten.sym_size.int and u.args[1] == 0 for u in node.users)


def _count_mask(editor: Editor, node: Node) -> None:
    """The chosen elements of the mask itself are as many as the rows."""
    mask: Any = _mask_of(node)
    with editor.graph.inserting_before(node):
        count = editor.graph.call_function(aten.index.Tensor, (mask, [mask]))
    count.meta = {k: v for k, v in node.meta.items() if k != "val"}  # where its size is bound, too
    count.meta["val"] = editor.empty(value(node).shape[:1], like=mask)
    node.replace_all_uses_with(count)
    _erase(node)


def _mask_of(node: Node) -> Node | None:
    """The mask over leading dims by which a node reads or writes its first argument."""
    indices: Any = node.args[1]
    mask, others = indices[0], indices[1:]
    if not is_tensor(mask) or value(mask).dtype != torch.bool or any(i is not None for i in others):
        return None
    sizes: Any = value(node.args[0]).shape  # type: ignore[arg-type]
    return mask if all(same(a, b) for a, b in zip(value(mask).shape, sizes, strict=False)) else None


def _of_rows(editor: Editor, node: Node) -> Node | None:
    whole: Any = node.args[0]
    mask = _mask_of(node)
    if mask is None or (node.args[3:] or (False,))[0]:  # accumulating
        return None
    updated = _Spread(editor, mask, value(whole).dim()).over_all_rows(node.args[2])
    chosen = mask
    for _ in range(value(whole).dim() - value(mask).dim()):
        chosen = editor.call(aten.unsqueeze.default, chosen, -1, like=node)
        chosen.meta["whorl_name"] = label(mask)
    return editor.call(aten.where.self, chosen, updated, whole, like=node)


def _of_elements(editor: Editor, node: Node) -> Node:
    whole, mask, source = node.args
    zeros = _zeros(editor, value(whole).shape, like=source)
    filled = editor.call(aten.masked_scatter.default, zeros, mask, source, like=node)
    return editor.call(aten.where.self, mask, filled, whole, like=node)


def _zeros(editor: Editor, sizes: Sequence[Any], like: Any) -> Node:
    kind = {"dtype": value(like).dtype, "device": value(like).device}
    return editor.call(aten.full.default, [editor.size(s) for s in sizes], 0, like=like, kwargs=kind)


class _Spread:
    """Values [chosen rows, ...] as values over all rows; what stands in the rows that are not chosen is not read."""

    def __init__(self, editor: Editor, mask: Node, dims: int) -> None:
        self.editor, self.mask = editor, mask
        self.features = dims - value(mask).dim()
        self.known: dict[Node, Any] = {}

    def over_all_rows(self, x: Any) -> Any:
        if not is_tensor(x) or value(x).dim() <= self.features:  # the same for every row
            return x
        if x not in self.known:
            self.known[x] = self._spread(x)
        return self.known[x]

    def _spread(self, x: Node) -> Any:
        if self._is_chosen(x):
            return x.args[0]
        if is_pointwise(x.target) and any(self._follows_chosen(a) for a in x.all_input_nodes):
            args, kwargs = torch.fx.node.map_aggregate((x.args, x.kwargs), self.over_all_rows)
            return self.editor.call(x.target, *args, kwargs=kwargs, like=x)  # type: ignore[arg-type]
        zeros = _zeros(self.editor, (*value(self.mask).shape, *value(x).shape[1:]), like=x)
        filled = self.editor.call(aten.index_put.default, zeros, [self.mask], x, like=x)
        filled.meta["whorl_name"] = f"{label(x)} where {label(self.mask)}"
        return filled

    def _is_chosen(self, x: Node) -> bool:
        return x.target is aten.index.Tensor and _mask_of(x) is self.mask

    def _follows_chosen(self, x: Node) -> bool:
        if self._is_chosen(x):
            return True
        return is_pointwise(x.target) and any(self._follows_chosen(a) for a in x.all_input_nodes)


def _erase(node: Node) -> None:
    """A node, and what only it read."""
    read = node.all_input_nodes
    node.graph.erase_node(node)
    for other in read:
        if other.op == "call_function" and not other.users and not other._erased:
            _erase(other)
