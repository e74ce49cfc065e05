"""Print a plan as text or return it as JSON values, with its assumptions."""

from dataclasses import asdict
from typing import Any

from whorl.plan.layout import Parallelism
from whorl.plan.memory import BUCKET, GB
from whorl.plan.search import Plan, Row

# Published runs to compare a prediction with: (model, hardware, cards, tokens of a sequence) -> layout and tokens/s
# per card.
PUBLISHED: dict[tuple[str, str, int, int], tuple[Parallelism, float]] = {
    ("deepseek-v3.2", "a3", 64, 32768): (Parallelism(pp=2, tp=4, cp=1, dp=16, ep=64, swap=True), 29.0),
}
COLUMNS = ("layout", "params", "grads", "optim", "activ", "buffers", "reserve", "total", "step s", "tok/s/card")


def published(plan: Plan) -> tuple[Parallelism, float] | None:
    """Return the layout and the tokens/s per card of a published run with the same key, or None."""
    key = (plan.model.name, plan.cluster.hardware.name, plan.cluster.cards, plan.settings.seq)
    return PUBLISHED.get(key)


def assumptions(plan: Plan) -> list[str]:
    """Return the sentences that state what the numbers of a plan assume."""
    hardware, settings = plan.cluster.hardware, plan.settings
    attention = "absorbed sparse attention" if plan.model.index_heads else "dense causal attention"
    checkpointing = (
        "full activation checkpointing: a layer saves its input, sharded over TP"
        if settings.checkpoint
        else "no activation checkpointing: a layer saves all that its backward reads"
    )
    return [
        f"weights, gradients and both moments in {settings.states}, activations in {settings.compute} bytes; "
        "FSDP shards all of them over the ranks of a stage, gathers a block again in backward and prefetches the next; "
        "with a pipeline this needs fsdp_reshard_after_forward always",
        f"{checkpointing}; backward frees layer after layer; with several micro-batches a rank stores all its "
        f"gradients; cross entropy of {settings.chunk or 'all'} tokens at once",
        f"1F1B, {settings.batch} sequences per step, one per micro-batch; {attention}; q/kv down-projections, router "
        "and indexer are repeated on every TP rank",
        f"the load of an expert has a standard deviation of {settings.imbalance:.0%} of its mean; the busiest rank is "
        "above the mean by sqrt(2 ln EP / experts per rank) of that",
        f"{settings.reserve:g} GB for the runtime; a swapped optimizer needs "
        f"{settings.ring * BUCKET * settings.moment / GB:.1f} GB on the device and moves "
        f"{2 * settings.moment:g} bytes per parameter each way at {hardware.host / GB:g} GB/s",
        f"a rank reaches {hardware.efficiency:g} of {hardware.flops / 1e12:g} TFLOP/s ({hardware.efficiency_source}), "
        f"and {settings.comm_efficiency:g} of {hardware.link / GB:g} GB/s to the {hardware.domain} ranks of its domain "
        f"and of {hardware.network / GB:g} GB/s to others",
        "FSDP traffic overlaps with compute; TP, EP and CP traffic does not; host launch time is not counted",
    ]


def _cells(row: Row) -> list[str]:
    memory = row.memory
    parts = [*asdict(memory).values(), memory.total]
    return [str(row.layout), *(f"{x:.1f}" for x in parts), f"{row.time.total:.1f}", f"{row.tokens_per_card:.1f}"]


def _table(rows: list[Row]) -> list[str]:
    cells = [list(COLUMNS), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]


def _by_context_parallelism(plan: Plan) -> dict[str, list[Row]]:
    return {
        "without context parallelism": [row for row in plan.feasible if row.layout.cp == 1],
        "with context parallelism": [row for row in plan.feasible if row.layout.cp > 1],
    }


def _comparison(plan: Plan) -> str | None:
    run = published(plan)
    if run is None:
        return None
    layout, speed = run
    row = next((row for row in plan.rows if row.layout == layout), None)
    if row is None:
        return None
    if not row.fits:
        need = f"{row.memory.total:.1f} GB"
        return f"published: {layout} at {speed:g} tokens/s per card; by this plan it needs {need} and does not fit"
    table = [r.layout for r in plan.feasible if (r.layout.cp == 1) == (layout.cp == 1)]
    return (
        f"published: {layout} at {speed:g} tokens/s per card; predicted {row.tokens_per_card:.1f}, "
        f"rank {table.index(layout) + 1} of {len(table)} in its table and "
        f"{plan.rank(layout)} of {len(plan.feasible)} overall"
    )


def render(plan: Plan, top: int) -> str:
    """Return the plan as text: the `top` fastest layouts with and without context parallelism, and the assumptions."""
    model, cluster = plan.model, plan.cluster
    need = plan.settings.needed(model.parameters) / GB
    lines = [
        f"{model.name}: {model.parameters / 1e9:.1f} B parameters, {need:.0f} GB of "
        f"{plan.settings.states} weights and gradients",
        f"{cluster.cards} {cluster.hardware.name} cards x {cluster.dies} dies of {cluster.memory:g} GB = "
        f"{cluster.ranks} ranks, {cluster.total:.0f} GB; {plan.settings.seq} tokens",
        "",
    ]
    if plan.problem is not None:
        lines += [
            f"nothing fits: {plan.problem}",
            "",
            "the layouts that need least:",
            *_table(plan.rows[: min(top, 3)]),
        ]
    else:
        lines.append(
            f"{len(plan.feasible)} of {len(plan.rows)} layouts fit; GB of the rank that needs most; fastest first"
        )
        for title, rows in _by_context_parallelism(plan).items():
            if rows:
                lines += ["", f"{title} ({len(rows)}):", *_table(rows[:top])]
    comparison = _comparison(plan)
    lines += [] if comparison is None else ["", comparison]
    return "\n".join([*lines, "", "assumed:", *(f"- {line}" for line in assumptions(plan))])


def _row(row: Row) -> dict[str, Any]:
    return {
        "layout": asdict(row.layout),
        "fits": row.fits,
        "memory_gb": {**asdict(row.memory), "total": row.memory.total},
        "step_seconds": {**asdict(row.time), "total": row.time.total},
        "tokens_per_second_per_card": row.tokens_per_card,
    }


def as_dict(plan: Plan, top: int) -> dict[str, Any]:
    """Return the plan as JSON values, with the rows that `render` shows."""
    run = published(plan)
    shown = (
        plan.rows[:top]
        if plan.problem is not None
        else [r for rows in _by_context_parallelism(plan).values() for r in rows[:top]]
    )
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "weights_and_gradients_gb": plan.settings.needed(plan.model.parameters) / GB,
        "cluster": {**asdict(plan.cluster), "ranks": plan.cluster.ranks, "total_gb": plan.cluster.total},
        "settings": asdict(plan.settings),
        "layouts": len(plan.rows),
        "feasible": len(plan.feasible),
        "problem": plan.problem,
        "rows": [_row(row) for row in shown],
        "published": None
        if run is None
        else {"layout": asdict(run[0]), "tokens_per_second_per_card": run[1], "rank": plan.rank(run[0])},
        "assumptions": assumptions(plan),
    }
