"""Runs the passes over one graph, in order, and reports what they did."""

import fnmatch
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from whorl import collectives

from . import agree
from .cleanup import check, cleanup, output_values, write_report
from .config import SequenceParallel
from .editor import Editor, copy_graph
from .gathers import fold, place_gathers, quantize_gathers
from .layout import ALL_GATHERS, ALL_REDUCES, Layout, group_of, ours
from .masks import spread_masks
from .report import Report, describe_place
from .rewriting import Rewrite
from .rows import example, label, product, same, value
from .sequence_parallel import eliminate_noops, infer_layouts, order_sum, split_all_reduces

Pass = Callable[[Rewrite], int]


def fuse_matmuls(state: Rewrite) -> int:
    """Fuse collectives with the matmuls beside them if `config.fuse` is set. Returns how many were fused."""
    if not state.config.fuse:
        return 0
    from . import async_tp

    count = async_tp.fuse_graph(state.graph, state.group, ordered=state.config.ordered, left=state.report.not_fused)
    fused = (ours.matmul_reduce_scatter.default, ours.all_gather_matmul.default, ours.matmul_all_reduce.default)
    state.report.gemms += [n.name for n in state.graph.nodes if n.target in fused and "mm" in n.args]
    return count


# The passes in order. Each returns how much it changed; `SequenceParallel(skip=(name,))` leaves one out.
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
    in_place: bool = False,
) -> GraphModule:
    """Rewrite a graph for sequence parallelism and return it.

    gm: a graph of aten, `_c10d_functional` and whorl operators with fake values; it is copied unless `in_place`.
    inputs: the layout of placeholders by name; those not named are REPLICATED, unless `config.sharded` matches their
    names. dump: a folder to which the graph is written before and after each pass. pipeline: the passes to run. Every
    rank of the group must call this with the same graph.
    Returns a graph with `meta["report"]`, the Report, and `meta["tokens"]`, the number of tokens (a number or a
    symbol).
    Raises ValueError for a name in `config.skip` or `inputs` that does not exist, RuntimeError when the ranks' graphs
    differ; warns when nothing was rewritten.
    Example: rewrite(gm, SequenceParallel(min_tokens=1000), inputs={"weight": Layout.VARYING}).meta["report"]
    """
    gm = gm if in_place else copy_graph(gm)
    _check_skip(config, pipeline)
    group = collectives.group_name(config.group)
    size = collectives.group_size(group)
    tokens = tokens_of(gm, group)
    report = Report(group=group, size=size, tokens=example(tokens), min_tokens=config.min_tokens)
    report.is_ordered = config.ordered
    report.unproven = [label(n) for n in gm.graph.nodes if n.meta.get("whorl_unproven")]
    gm.meta["report"], gm.meta["tokens"] = report, tokens
    if size == 1:
        return gm
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
    before, known = output_values(gm), set(gm.graph.nodes)
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
        warnings.warn(_explain_no_rewrite(gm, report), RuntimeWarning, stacklevel=2)
    return gm


def order_sums(gm: GraphModule, config: SequenceParallel) -> GraphModule:
    """Return a copy of the plain graph that sums every all-reduce over the group in rank order.

    The rewritten graph does the same, so both give the same bits.
    """
    gm = copy_graph(gm)
    order_sums_in_place(gm, config)
    return gm


def order_sums_in_place(gm: GraphModule, config: SequenceParallel) -> int:
    """Do what `order_sums` does on the graph itself. Returns how many all-reduces were replaced."""
    group = collectives.group_name(config.group)
    if not config.ordered or collectives.group_size(group) == 1:
        return 0
    editor = Editor(gm)
    count = sum(order_sum(editor, node, group) for node in list(gm.graph.nodes))
    gm.recompile()
    return count


def tokens_of(gm: GraphModule, group: str) -> Any:
    """Return the number of tokens of the graph: the most frequent number of rows of its all-reduces and gathers.

    Only those over the group count. The result is a number or a symbol; 0 for a graph without any.
    """
    counts: list[list[Any]] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in ALL_REDUCES | ALL_GATHERS or group_of(node) != group:
            continue
        shape = value(node).shape
        rows = product(shape[:-1]) if node.target in ALL_REDUCES else shape[0]
        if free_unbacked_symbols(rows):  # it depends on data, so no call could be dispatched by it
            continue
        entry = next((c for c in counts if same(c[0], rows)), None)
        if entry is None:
            counts.append([rows, 1])
        else:
            entry[1] += 1
    rows = max(counts, key=lambda c: c[1])[0] if counts else 0
    is_number = isinstance(rows, int) or rows.node.expr.is_number
    return int(rows) if is_number else rows


def _check_skip(config: SequenceParallel, pipeline: Sequence[tuple[str, Pass]]) -> None:
    names = [name for name, _ in pipeline]
    optional = [name for name in names if name not in ("report", "cleanup")]
    wrong = [name for name in config.skip if name not in optional]
    if wrong:
        raise ValueError(f"SequenceParallel: skip has {wrong}; passes that can be left out: {optional}")


def _inputs(gm: GraphModule, config: SequenceParallel, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    names = [n.name for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    unknown = [name for name in layouts if name not in names]
    if unknown:
        raise ValueError(f"rewrite: inputs has {unknown}; the graph's are {names}")
    if not layouts:  # otherwise the caller has matched them with the model's names
        warn_of_unmatched(config, names)
    return {name: Layout.VARYING for name in names if matches(name, config.sharded)} | dict(layouts)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern is a dot-separated part of the name, or matches it by fnmatch."""
    return any(p in name.split(".") or fnmatch.fnmatch(name, p) for p in patterns)


def warn_of_unmatched(config: SequenceParallel, names: Sequence[str]) -> None:
    """Warn of names in `config.sharded` that match no input.

    A misspelt one would make the passes treat a weight as equal on all ranks that is not.
    """
    wrong = [p for p in config.sharded if not any(matches(name, (p,)) for name in names)]
    if wrong:
        text = f"SequenceParallel: sharded has {wrong}, which match no input of the graph; its inputs are {list(names)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _dump(folder: str | Path | None, name: str, gm: GraphModule) -> None:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.txt").write_text(f"{gm.graph}\n")


def _explain_no_rewrite(gm: GraphModule, report: Report) -> str:
    if report.collectives:
        reducing = [c for c in report.collectives if c.kind in ("all_reduce", "all_gather")]
        nearest = (reducing or report.collectives)[0]
        proof = f". {report.describe_unproven()}" if report.unproven else ""
        return (
            f"sequence parallelism is on and rewrote none of {len(report.collectives)} collectives. "
            f"Nearest miss: {nearest.kind} {nearest.shape} {describe_place(nearest)}: {nearest.reason}{proof}"
        )
    other_groups = sorted({str(group_of(n)) for n in gm.graph.nodes if _is_sum(n)})
    other_sums = f"; it has all-reduces over {other_groups}" if other_groups else ""
    return f"sequence parallelism is on, but the graph has no collective over group {report.group!r}{other_sums}"


def _is_sum(node: Node) -> bool:
    return node.op == "call_function" and node.target in ALL_REDUCES and value(node) is not None
