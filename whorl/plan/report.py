"""A plan as text and as JSON, with what it rests on."""

from dataclasses import asdict
from typing import Any

from whorl.plan.layout import Parallelism
from whorl.plan.memory import GB, RING
from whorl.plan.search import Plan, Row

# What others have published, to set beside a prediction: (model, hardware, cards, tokens), layout, tokens/s of a card.
PUBLISHED: dict[tuple[str, str, int, int], tuple[Parallelism, float]] = {
    ("deepseek-v3.2", "a3", 64, 32768): (Parallelism(pp=2, tp=4, cp=1, dp=16, ep=64, swap=True), 29.0),
}
COLUMNS = ("layout", "params", "grads", "optim", "activ", "buffers", "reserve", "total", "step s", "tok/s/card")


def published(plan: Plan) -> tuple[Parallelism, float] | None:
    key = (plan.model.name, plan.cluster.hardware.name, plan.cluster.cards, plan.settings.seq)
    return PUBLISHED.get(key)


def assumptions(plan: Plan) -> list[str]:
    hardware, settings = plan.cluster.hardware, plan.settings
    attention = "absorbed sparse attention" if plan.model.index_heads else "dense causal attention"
    kept = (
        "full activation checkpointing: a layer keeps its input, sharded over TP"
        if settings.checkpoint
        else "no activation checkpointing: a layer keeps all that its backward reads"
    )
    return [
        f"weights, gradients and both moments in {settings.states}, {settings.compute} bytes for what is computed; "
        "FSDP shards all of them over a stage's ranks and gathers a block again in backward, the next ahead of time; "
        "with a pipeline that takes fsdp_reshard_after_forward always",
        f"{kept}; backward frees layer after layer; gradients all the time where a rank has several microbatches; "
        f"cross entropy {'of all' if not settings.chunk else settings.chunk} tokens at once",
        f"1F1B, {settings.batch} sequences a step, one in a microbatch; {attention}; q/kv down-projections, router and "
        "indexer are repeated on every TP rank",
        f"load of an expert varies by {settings.imbalance:.0%} of its mean (sqrt(2 ln EP / experts per rank) of "
        "that on the fullest rank)",
        f"{settings.reserve:g} GB for the runtime; a swapped optimizer keeps {RING * settings.moment / GB:.1f} GB "
        f"of buffers and moves {2 * settings.moment} bytes a parameter each way at {hardware.host / GB:g} GB/s",
        f"a rank: {hardware.flops / 1e12:g} TFLOP/s at {hardware.efficiency:g} ({hardware.efficiency_source}), "
        f"{hardware.link / GB:g} GB/s to {hardware.domain} ranks and {hardware.network / GB:g} GB/s beyond, at "
        f"{settings.comm_efficiency:g}",
        "FSDP's traffic hides behind computing; TP's, EP's and CP's does not; host launch time is not counted",
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


def _split(plan: Plan) -> dict[str, list[Row]]:
    return {
        "without context parallelism": [row for row in plan.feasible if row.layout.cp == 1],
        "with context parallelism": [row for row in plan.feasible if row.layout.cp > 1],
    }


def _beside(plan: Plan) -> str | None:
    found = published(plan)
    if found is None:
        return None
    layout, speed = found
    row = next((row for row in plan.rows if row.layout == layout), None)
    if row is None:
        return None
    if not row.fits:
        return f"published: {layout} at {speed:g} tokens/s per card; here it does not fit ({row.memory.total:.1f} GB)"
    same = [r.layout for r in plan.feasible if (r.layout.cp == 1) == (layout.cp == 1)]
    return (
        f"published: {layout} at {speed:g} tokens/s per card; predicted {row.tokens_per_card:.1f}, "
        f"number {same.index(layout) + 1} of {len(same)} in its table, "
        f"{plan.rank(layout)} of {len(plan.feasible)} in all"
    )


def render(plan: Plan, top: int) -> str:
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
        lines += [f"nothing fits: {plan.problem}", "", "the smallest:", *_table(plan.rows[: min(top, 3)])]
    else:
        lines.append(f"{len(plan.feasible)} of {len(plan.rows)} layouts fit; GB of the fullest rank; fastest first")
        for title, rows in _split(plan).items():
            if rows:
                lines += ["", f"{title} ({len(rows)}):", *_table(rows[:top])]
    beside = _beside(plan)
    lines += [] if beside is None else ["", beside]
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
    found = published(plan)
    shown = plan.rows[:top] if plan.problem is not None else [r for rows in _split(plan).values() for r in rows[:top]]
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
        if found is None
        else {"layout": asdict(found[0]), "tokens_per_second_per_card": found[1], "rank": plan.rank(found[0])},
        "assumptions": assumptions(plan),
    }
