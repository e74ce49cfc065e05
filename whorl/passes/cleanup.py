"""The end of the pipeline: what is dead goes, the contracts are checked, the report is written."""

import contextlib
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .layout import c10d, group_of, ours
from .report import Gather, module_path, source_line
from .rows import same, value
from .sequence_parallel import Rewrite, _describe

aten = torch.ops.aten


def cleanup(state: Rewrite) -> int:
    """Drop dead nodes; with `ordered` off, put the backend's own collectives in. Returns how many nodes went."""
    before = len(state.graph.nodes)
    _drop_dead(state.gm)
    after = len(state.graph.nodes)
    if not state.config.ordered:
        _lower(state)
    state.graph.lint()
    state.gm.recompile()
    return before - after


def _drop_dead(gm: GraphModule) -> None:
    """Collectives are not dead code to torch; here an unused one is."""
    for node in reversed(list(gm.graph.nodes)):
        is_collective = node.op == "call_function" and (group_of(node) or node.target is c10d.wait_tensor.default)
        if is_collective and not node.users:
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def write_report(state: Rewrite) -> int:
    """Before collectives and products become one. Returns how many gathers there are."""
    report = state.report
    for root in state.roots:
        is_local = root in state.local_roots
        reason = "rows stay on their rank until the gathers below" if is_local else state.reasons.get(root, "not placed")
        report.collectives.append(_describe(state, root, state.kinds[root], rewritten=is_local, reason=reason))
    report.collectives += state.left_alone
    for node, (size, reason) in state.placed.items():
        if node._erased:
            continue
        report.gathers.append(
            Gather(
                value=node.args[0].name,  # type: ignore[union-attr]
                module=module_path(node),
                source=source_line(node),
                shape=str(list(value(node).shape)),
                dtype=_wire_dtype(state, node),
                row_bytes=size,
                reason=reason,
                is_quantized=node.target is ours.all_gather_quantized.default,
            )
        )
    return len(report.gathers)


def _wire_dtype(state: Rewrite, node: Node) -> str:
    if node.target is ours.all_gather_quantized.default:
        return str(state.config.quantize)
    return str(value(node).dtype).removeprefix("torch.")


# ---- contracts


def check(gm: GraphModule, before: list[Any], mode: Any) -> None:
    """No full and short values meet, and every output has the shape it had: the graph is run on shapes alone."""
    env = mode.shape_env
    with mode, env.suppress_guards() if env is not None else contextlib.nullcontext():
        try:
            after = _run_shapes(gm)
        except Exception as e:
            raise RuntimeError(f"sequence parallelism left full and short values together: {e}") from e
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if isinstance(old, Tensor) and [str(s) for s in old.shape] != [str(s) for s in new.shape]:
            sizes = zip(old.shape, new.shape, strict=False)
            if old.dim() != new.dim() or not all(same(a, b) for a, b in sizes):
                raise RuntimeError(
                    f"sequence parallelism changed output {i} from {list(old.shape)} to {list(new.shape)}: "
                    "inputs and outputs keep their layout"
                )


def _run_shapes(gm: GraphModule) -> list[Any]:
    found: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            return outputs_of(gm, found)
        if node.op == "call_function":
            read = torch.fx.node.map_aggregate((node.args, node.kwargs), lambda a: found[a] if isinstance(a, Node) else a)
            found[node] = node.target(*read[0], **read[1])
        else:
            found[node] = value(node)
    raise AssertionError("a graph has an output")


def outputs_of(gm: GraphModule, found: dict[Node, Any] | None = None) -> list[Any]:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    given, _ = torch.utils._pytree.tree_flatten(output.args[0])
    return [(value(n) if found is None else found[n]) if isinstance(n, Node) else n for n in given]


# ---- the backend's own collectives


def _lower(state: Rewrite) -> None:
    """Rank-ordered sums become torch's functional collectives, which the backend may sum as it likes."""
    size, edit = state.size, state.editor
    for node in list(state.graph.nodes):
        if node.op != "call_function" or group_of(node) != state.group:
            continue
        source: Any = node.args[0]
        with state.graph.inserting_before(node):
            if node.target is ours.ordered_all_reduce.default:
                new = edit.call(c10d.all_reduce.default, source, "sum", state.group, like=node)
            elif node.target is ours.ordered_reduce_scatter.default:
                new = edit.call(
                    c10d.reduce_scatter_tensor.default, _pad(state, source), "sum", size, state.group, like=node
                )
            elif node.target is ours.all_gather.default:
                new = edit.call(c10d.all_gather_into_tensor.default, source, size, state.group, like=node)
            else:
                continue
            new = edit.call(c10d.wait_tensor.default, new, like=node)
            if node.target is ours.all_gather.default and not same(value(node).shape[0] % size, 0):
                new = edit.call(aten.slice.Tensor, new, 0, 0, node.args[1], like=node)
        node.replace_all_uses_with(new)
        state.graph.erase_node(node)


def _pad(state: Rewrite, node: Node) -> Node:
    tokens, size, edit = value(node).shape[0], state.size, state.editor
    if same(tokens % size, 0):
        return node
    count = edit.size(tokens)
    if isinstance(count, Node):
        missing: Any = edit.call(operator.mod, edit.call(operator.neg, count), size)
    else:
        missing = -count % size
    widths = [0, 0] * (value(node).dim() - 1) + [0, missing]
    return edit.call(aten.constant_pad_nd.default, node, widths, 0.0)
