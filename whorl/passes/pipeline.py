"""Runs the passes over one graph, in order, and says what they did."""

import fnmatch
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from whorl import collectives

from . import agree
from .cleanup import check, cleanup, outputs_of, write_report
from .config import SequenceParallel
from .editor import Editor, copied
from .layout import ALL_GATHERS, ALL_REDUCES, Layout, c10d, group_of, ours
from .report import Report
from .rows import product, same, value
from .sequence_parallel import (
    Rewrite,
    eliminate_noops,
    fold,
    infer_layouts,
    place_gathers,
    quantize_gathers,
    split_all_reduces,
    spread_masks,
)

Pass = Callable[[Rewrite], int]


def fuse_matmuls(state: Rewrite) -> int:
    """Collectives and the products beside them as one operator, when asked for."""
    if not state.config.fuse:
        return 0
    from . import async_tp

    count = async_tp.fuse_graph(state.graph, state.group, ordered=state.config.ordered, left=state.report.not_fused)
    fused = (ours.matmul_reduce_scatter.default, ours.all_gather_matmul.default, ours.matmul_all_reduce.default)
    state.report.gemms += [n.name for n in state.graph.nodes if n.target in fused and "mm" in n.args]
    return count


# In this order. Each pass returns how much it changed; `SequenceParallel(skip=(name,))` leaves one out.
PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("noops", eliminate_noops),
    ("masks", spread_masks),
    ("layouts", infer_layouts),
    ("split", split_all_reduces),
    ("place", place_gathers),
    ("fold", fold),
    ("quantize", quantize_gathers),
    ("report", write_report),
    ("fuse", fuse_matmuls),
    ("cleanup", cleanup),
)


def rewrite(
    gm: GraphModule,
    config: SequenceParallel,
    *,
    inputs: Mapping[str, Layout] | None = None,
    dump: str | Path | None = None,
    pipeline: Sequence[tuple[str, Pass]] = PIPELINE,
) -> GraphModule:
    """The graph with sequence parallelism; `meta["report"]` says what was done, `meta["tokens"]` counts the rows.

    gm: of aten, `_c10d_functional` and our own operators, with fake values. It is not changed. inputs: the layout of
    placeholders by name; those not named are REPLICATED, unless `config.sharded` matches their names. Every rank of
    the group must call this with the same graph. dump: a folder for the graph before and after each pass.
    """
    gm = copied(gm)
    rewrite_in_place(gm, config, inputs=inputs, dump=dump, pipeline=pipeline)
    return gm


def rewrite_in_place(
    gm: GraphModule,
    config: SequenceParallel,
    *,
    inputs: Mapping[str, Layout] | None = None,
    dump: str | Path | None = None,
    pipeline: Sequence[tuple[str, Pass]] = PIPELINE,
) -> Report:
    """As `rewrite`, on the graph itself."""
    _check_skip(config, pipeline)
    group = collectives.group_name(config.group)
    size = collectives.group_size(group)
    tokens = tokens_of(gm, group)
    report = Report(group=group, size=size, tokens=_hint(tokens), min_tokens=config.min_tokens)
    gm.meta["report"], gm.meta["tokens"] = report, tokens
    if size == 1:
        return report
    differing = agree.compare(gm, group, "captured graph")
    report.varying = sorted(differing)
    state = Rewrite(
        gm=gm,
        config=config,
        group=group,
        report=report,
        inputs=_inputs(gm, config, inputs or {}),
        differing=differing,
        editor=Editor(gm),
    )
    before, known = outputs_of(gm), set(gm.graph.nodes)
    for i, (name, run) in enumerate(pipeline):
        if name in config.skip:
            continue
        _dump(dump, f"{i}_{name}_before", gm)
        report.counts[name] = run(state)
        _dump(dump, f"{i}_{name}_after", gm)
    check(gm, before, known, state.editor.mode)
    agree.compare(gm, group, "rewritten graph")
    report.graph_hash = agree.graph_hash(gm)
    if not report.rewrites:
        warnings.warn(_nothing_done(gm, report), RuntimeWarning, stacklevel=3)
    return report


def order_sums(gm: GraphModule, config: SequenceParallel) -> GraphModule:
    """The plain graph with every all-reduce over the group summed in rank order, as the rewritten graph does."""
    gm = copied(gm)
    order_sums_in_place(gm, config)
    return gm


def order_sums_in_place(gm: GraphModule, config: SequenceParallel) -> int:
    """As `order_sums`, on the graph itself. Returns how many."""
    group = collectives.group_name(config.group)
    if not config.ordered or collectives.group_size(group) == 1:
        return 0
    editor, count = Editor(gm), 0
    for node in list(gm.graph.nodes):
        is_sum = node.target is c10d.all_reduce.default and node.args[1] == "sum" and group_of(node) == group
        if not is_sum or [u.target for u in node.users] != [c10d.wait_tensor.default]:
            continue
        (wait,) = node.users
        with gm.graph.inserting_before(wait):
            ordered = editor.call(ours.ordered_all_reduce.default, node.args[0], group, like=node)
        wait.replace_all_uses_with(ordered)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(node)
        count += 1
    gm.recompile()
    return count


def tokens_of(gm: GraphModule, group: str) -> Any:
    """The rows of most of the all-reduces and gathers over the group: a number or a symbol; 0 without any."""
    counts: list[list[Any]] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in ALL_REDUCES | ALL_GATHERS or group_of(node) != group:
            continue
        rows = product(value(node).shape[:-1])
        known = next((c for c in counts if same(c[0], rows)), None)
        if known is None:
            counts.append([rows, 1])
        else:
            known[1] += 1
    rows = max(counts, key=lambda c: c[1])[0] if counts else 0
    is_number = isinstance(rows, int) or rows.node.expr.is_number
    return int(rows) if is_number else rows


def _check_skip(config: SequenceParallel, pipeline: Sequence[tuple[str, Pass]]) -> None:
    names = [name for name, _ in pipeline]
    optional = [name for name in names if name not in ("report", "cleanup")]
    wrong = [name for name in config.skip if name not in optional]
    if wrong:
        raise ValueError(f"SequenceParallel: skip has {wrong}; passes that can be left out: {optional}")


def _inputs(gm: GraphModule, config: SequenceParallel, given: Mapping[str, Layout]) -> dict[str, Layout]:
    names = [n.name for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"rewrite: inputs has {unknown}; the graph's are {names}")
    return {name: Layout.VARYING for name in names if matches(name, config.sharded)} | dict(given)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(p in name.split(".") or fnmatch.fnmatch(name, p) for p in patterns)


def _dump(folder: str | Path | None, name: str, gm: GraphModule) -> None:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.txt").write_text(f"{gm.graph}\n")


def _hint(count: Any) -> int:
    return int(count) if isinstance(count, int) else int(count.node.hint or 0)


def _nothing_done(gm: GraphModule, report: Report) -> str:
    if report.collectives:
        nearest = report.collectives[0]
        where = " ".join(p for p in (nearest.module, nearest.source) if p)
        return (
            f"sequence parallelism is on and rewrote none of {len(report.collectives)} collectives. "
            f"Nearest miss: {nearest.kind} {nearest.shape} {where}: {nearest.reason}"
        )
    others = sorted({str(group_of(n)) for n in gm.graph.nodes if _is_sum(n)})
    found = f"; it has all-reduces over {others}" if others else ""
    return f"sequence parallelism is on, but the graph has no collective over group {report.group!r}{found}"


def _is_sum(node: Node) -> bool:
    return node.op == "call_function" and node.target in ALL_REDUCES and value(node) is not None
