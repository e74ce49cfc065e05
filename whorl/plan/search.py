"""Estimate every layout of a model on a cluster, sort them, and say why none fits if none does.

Memory is per rank (one die of a card), in GB of 10**9 bytes. `report.assumptions` lists what the numbers assume.
"""

from dataclasses import asdict, dataclass
from typing import Any

from whorl.plan.hardware import Cluster
from whorl.plan.layout import Parallelism, PlanSettings, layouts
from whorl.plan.memory import GB, Memory, memory_of
from whorl.plan.model_shape import ModelShape
from whorl.plan.speed import Time, time_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The estimates for one layout."""

    layout: Parallelism
    memory: Memory
    time: Time
    fits: bool
    tokens_per_card: float  # per second


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All layouts of a model on a cluster, with their estimates."""

    model: ModelShape
    cluster: Cluster
    settings: PlanSettings
    rows: list[Row]  # those that fit, fastest first, then those that do not, least memory first
    problem: str | None  # why no layout fits

    @property
    def feasible(self) -> list[Row]:
        return [row for row in self.rows if row.fits]

    def rank(self, layout: Parallelism) -> int | None:
        """Return the place of a layout when sorted by speed (no process rank): 1 is the fastest, None does not fit."""
        return next((n for n, row in enumerate(self.feasible, 1) if row.layout == layout), None)


def make_plan(model: ModelShape, cluster: Cluster, settings: PlanSettings) -> Plan:
    """Return the plan of a model on a cluster; raises ValueError when a number is out of range or no layout divides."""
    counts = {"cards": cluster.cards, "dies": cluster.dies, "seq": settings.seq, "batch": settings.batch}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    if cluster.memory <= 0:
        raise ValueError(f"memory is {cluster.memory} GB, expected a positive number")
    rows = [_row(model, layout, cluster, settings) for layout in layouts(model, cluster.ranks, settings)]
    if not rows:
        raise ValueError(
            f"{model.name} on {cluster.ranks} ranks: no layout divides {model.heads} heads, {settings.seq} tokens and "
            f"{settings.batch} sequences evenly, with as many sequences per data-parallel rank as stages; "
            "change --cards, --seq or --batch"
        )
    rows.sort(key=lambda row: (not row.fits, -row.tokens_per_card if row.fits else row.memory.total))
    problem = _problem(model, cluster, settings, rows)
    return Plan(model=model, cluster=cluster, settings=settings, rows=rows, problem=problem)


def _row(model: ModelShape, layout: Parallelism, cluster: Cluster, settings: PlanSettings) -> Row:
    memory, time = memory_of(model, layout, settings), time_of(model, layout, cluster, settings)
    return Row(
        layout=layout,
        memory=memory,
        time=time,
        fits=memory.total <= cluster.memory,
        tokens_per_card=settings.batch * settings.seq / time.total / cluster.cards,
    )


def _problem(model: ModelShape, cluster: Cluster, settings: PlanSettings, rows: list[Row]) -> str | None:
    """Return why no layout fits, or None when one does."""
    if rows[0].fits:
        return None
    need = settings.needed(model.parameters) / GB
    if need > cluster.total:
        without_indexers = settings.needed(model.parameters - model.layers * model.indexer) / GB
        note = f" ({without_indexers:.0f} GB without the indexers)" if model.indexer else ""
        return (
            f"{settings.states} weights and gradients alone take {need:.0f} GB{note}; "
            f"{cluster.cards} cards have {cluster.total:.0f} GB"
        )
    smallest = rows[0]
    parts: dict[str, Any] = asdict(smallest.memory)
    largest = max(parts, key=parts.__getitem__)
    return (
        f"the smallest layout, {smallest.layout}, needs {smallest.memory.total:.1f} GB of a rank's "
        f"{cluster.memory:.0f}, most of it {largest} ({parts[largest]:.1f} GB)"
    )
