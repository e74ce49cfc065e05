"""Runs the passes over one graph, in order, and says what they did."""

import fnmatch
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from whorl import collectives

from . import agree
from .cleanup import check, cleanup, outputs_of, write_report
from .config import SequenceParallel
from .editor import Editor, copied
from .gathers import fold, place_gathers, quantize_gathers
from .layout import ALL_GATHERS, ALL_REDUCES, Layout, group_of, ours
from .report import Report, place
from .rewriting import Rewrite
from .rows import example, label, product, same, value
from .sequence_parallel import eliminate_noops, infer_layouts, order_sum, split_all_reduces, spread_masks

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
    in_place: bool = False,
) -> GraphModule:
    """The graph with sequence parallelism; `meta["report"]` says what was done, `meta["tokens"]` counts the rows.

    gm: of aten, `_c10d_functional` and our own operators, with fake values. It is not changed, unless `in_place`.
    inputs: the layout of placeholders by name; those not named are REPLICATED, unless `config.sharded` matches their
    names. Every rank of the group must call this with the same graph. dump: a folder for the graph before and after
    each pass.
    """
    gm = gm if in_place else copied(gm)
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
        warnings.warn(_nothing_done(gm, report), RuntimeWarning, stacklevel=2)
    return gm


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
    editor = Editor(gm)
    count = sum(order_sum(editor, node, group) for node in list(gm.graph.nodes))
    gm.recompile()
    return count


def tokens_of(gm: GraphModule, group: str) -> Any:
    """The rows of most of the all-reduces and gathers over the group: a number or a symbol; 0 without any."""
    counts: list[list[Any]] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in ALL_REDUCES | ALL_GATHERS or group_of(node) != group:
            continue
        shape = value(node).shape
        rows = product(shape[:-1]) if node.target in ALL_REDUCES else shape[0]
        if free_unbacked_symbols(rows):  # only data can say: no call could be judged by it
            continue
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
    if not given:  # else they were matched with the model's names
        warn_of_unmatched(config, names)
    return {name: Layout.VARYING for name in names if matches(name, config.sharded)} | dict(given)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(p in name.split(".") or fnmatch.fnmatch(name, p) for p in patterns)


def warn_of_unmatched(config: SequenceParallel, names: Sequence[str]) -> None:
    """A misspelt declaration would make a weight equal on all ranks that is not."""
    wrong = [p for p in config.sharded if not any(matches(name, (p,)) for name in names)]
    if wrong:
        text = f"SequenceParallel: sharded has {wrong}, which match no input of the graph; its inputs are {list(names)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _dump(folder: str | Path | None, name: str, gm: GraphModule) -> None:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.txt").write_text(f"{gm.graph}\n")


def _nothing_done(gm: GraphModule, report: Report) -> str:
    if report.collectives:
        reducing = [c for c in report.collectives if c.kind in ("all_reduce", "all_gather")]
        nearest = (reducing or report.collectives)[0]
        proof = f". {report.what_is_unproven()}" if report.unproven else ""
        return (
            f"sequence parallelism is on and rewrote none of {len(report.collectives)} collectives. "
            f"Nearest miss: {nearest.kind} {nearest.shape} {place(nearest)}: {nearest.reason}{proof}"
        )
    others = sorted({str(group_of(n)) for n in gm.graph.nodes if _is_sum(n)})
    found = f"; it has all-reduces over {others}" if others else ""
    return f"sequence parallelism is on, but the graph has no collective over group {report.group!r}{found}"


def _is_sum(node: Node) -> bool:
    return node.op == "call_function" and node.target in ALL_REDUCES and value(node) is not None
