"""The last passes: write the report, drop dead nodes, and check that shapes still agree."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from whorl import collectives

from .layout import c10d, group_of, ours
from .report import Gather, module_path, source_line
from .rewriting import Rewrite
from .rows import same, value
from .sequence_parallel import _describe, other_rows

aten = torch.ops.aten


def cleanup(state: Rewrite) -> int:
    """Drop dead nodes; with `ordered` off, replace rank-ordered sums by the backend's own collectives.

    Returns how many nodes were dropped.
    """
    before = len(state.graph.nodes)
    _drop_dead(state.gm)
    after = len(state.graph.nodes)
    if not state.config.ordered:
        _lower(state)
    state.graph.lint()
    state.gm.recompile()
    return before - after


def _drop_dead(gm: GraphModule) -> None:
    """Drop unused nodes, collectives included, which torch's dead code elimination would keep for their effects."""
    for node in reversed(list(gm.graph.nodes)):
        is_collective = node.op == "call_function" and (group_of(node) or node.target is c10d.wait_tensor.default)
        if is_collective and not node.users:
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def write_report(state: Rewrite) -> int:
    """Add every collective and gather to the report, before `fuse` merges them with matmuls.

    Returns how many gathers there are.
    """
    report = state.report
    for root in state.roots:
        is_local = root in state.local_roots
        reason = (
            "each rank keeps its rows until the gathers below" if is_local else state.reasons.get(root, "not placed")
        )
        report.collectives.append(_describe(state, root, state.kinds[root], rewritten=is_local, reason=reason, lead=1))
    report.collectives += state.left_alone
    for node, (size, reason) in state.placed.items():
        if node._erased:
            continue
        rows = value(node).shape[0]
        shard: Any = node.args[0]
        report.gathers.append(
            Gather(
                value=shard.name,
                module=module_path(node),
                source=source_line(node),
                shape=str(list(value(node).shape)),
                dtype=_sent_dtype(state, node),
                row_bytes=size,
                reason=reason,
                is_quantized=node.target is ours.all_gather_quantized.default,
                rows=other_rows(rows, state.gm.meta["tokens"], state.size),
            )
        )
    return len(report.gathers)


def _sent_dtype(state: Rewrite, node: Node) -> str:
    if node.target is ours.all_gather_quantized.default:
        return str(state.config.quantize)
    return str(value(node).dtype).removeprefix("torch.")


# ---- checks


def check(gm: GraphModule, before: list[Any], known: set[Node], mode: Any) -> None:
    """Check that no operator mixes full tensors with a rank's rows, and that every output has the shape it had.

    before: the outputs of the captured graph; known: its nodes. Nodes that are new, or read a new one, are run on fake
    tensors. Raises RuntimeError naming the node or output that is wrong.
    """
    env = mode.shape_env
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if env is not None:
            stack.enter_context(env.suppress_guards())
            stack.enter_context(env.ignore_fresh_unbacked_symbols())
        for node in gm.graph.nodes:
            is_touched = node not in known or any(a not in known for a in node.all_input_nodes)
            if node.op == "call_function" and is_touched:
                _check_node(node)
    for i, (old, new) in enumerate(zip(before, output_values(gm), strict=True)):
        if isinstance(old, Tensor) and not _same_shape(old, new):
            raise RuntimeError(
                f"sequence parallelism changed output {i} from {list(old.shape)} to {list(new.shape)}: "
                "inputs and outputs must keep their shapes"
            )


def _check_node(node: Node) -> None:
    arguments = torch.fx.node.map_aggregate((node.args, node.kwargs), lambda a: value(a) if isinstance(a, Node) else a)
    try:
        result = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
    except Exception as e:
        raise RuntimeError(f"sequence parallelism: {node.name} mixes full tensors and a rank's rows: {e}") from e
    pairs = zip(*(torch.utils._pytree.tree_leaves(x) for x in (result, value(node))), strict=True)
    for actual, recorded in pairs:
        if isinstance(recorded, Tensor) and (not _same_shape(actual, recorded) or actual.dtype != recorded.dtype):
            raise RuntimeError(
                f"sequence parallelism: {node.name} gives {list(actual.shape)} {actual.dtype}, "
                f"not {list(recorded.shape)} {recorded.dtype}"
            )


def _same_shape(a: Tensor, b: Tensor) -> bool:
    """Return whether two shapes are equal; sizes are compared as expressions.

    The rows of a rank are one symbol throughout the graph. A size that depends on data gets a new symbol in `a`, and
    counts as equal.
    """
    return a.dim() == b.dim() and all(
        str(x) == str(y) or same(x, y) or bool(free_unbacked_symbols(x)) or _is_example_of_one(x, y)
        for x, y in zip(a.shape, b.shape, strict=True)
    )


def _is_example_of_one(actual: Any, recorded: Any) -> bool:
    """Return whether a symbolic size came out as 1 because 1 is its hint, its value at capture.

    Broadcasting tests whether a size is 1, and the hint answers: with few tokens a rank has one row at capture.
    """
    return isinstance(actual, int) and actual == 1 and isinstance(recorded, torch.SymInt) and recorded.node.hint == 1


def output_values(gm: GraphModule) -> list[Any]:
    """Return the fake values that the graph returns, flattened."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned, _ = torch.utils._pytree.tree_flatten(output.args[0])
    return [value(n) if isinstance(n, Node) else n for n in returned]


# ---- the backend's own collectives


def _lower(state: Rewrite) -> None:
    """Replace rank-ordered sums by torch's functional collectives, which the backend may sum in any order."""
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
    # Computed from rows_per_rank, so that a rank's rows are the same expression as everywhere else in the graph.
    padding = edit.size(size * collectives.rows_per_rank(tokens, size) - tokens)
    widths = [0, 0] * (value(node).dim() - 1) + [0, padding]
    return edit.call(aten.constant_pad_nd.default, node, widths, 0.0)
