"""Which layouts of a model fit a cluster, and how fast they would train: arithmetic alone, no torch.

Memory is per rank (one die of a card), GB of 10**9 bytes. `plan_report.assumptions` says what the numbers rest on.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from whorl.titan.model_shape import FORWARDS, ModelShape
from whorl.titan.plan_layout import Layout, Settings, fullest, held, layouts, stage_weights, stages
from whorl.titan.plan_memory import GB, Memory, memory_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One rank's share; bytes and FLOPs per second."""

    name: str
    dies: int  # of a card
    memory: float  # GB of a die
    flops: float
    memory_bandwidth: float
    link: float  # to the ranks of its domain
    domain: int  # ranks that reach each other at that speed
    network: float  # to all others
    host: float  # to the host's memory, each way
    efficiency: float  # share of `flops` that a layer reaches
    efficiency_source: str
    masked: bool = True  # see `Settings`


A3 = Hardware(
    name="a3",
    dies=2,
    memory=64,
    flops=376e12,
    memory_bandwidth=1.6e12,
    link=196e9,
    domain=768,
    network=25e9,
    host=50e9,
    efficiency=0.066,
    efficiency_source="published run of 8 layers of DeepSeek-V3.2 with 8 experts at 4096 tokens: 400 tokens/s, "
    "taken as one die; its 4-layer run, 568 tokens/s, gives 0.051",
    masked=False,
)
H200 = Hardware(
    name="h200",
    dies=1,
    memory=141,
    flops=989e12,
    memory_bandwidth=4.3e12,
    link=450e9,
    domain=8,
    network=50e9,
    host=50e9,
    efficiency=0.35,
    efficiency_source="assumed, not measured",
)
HARDWARE = {h.name: h for h in (A3, H200)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    hardware: Hardware
    cards: int
    dies: int = 1
    memory: float  # GB of a die

    @property
    def ranks(self) -> int:
        return self.cards * self.dies

    @property
    def total(self) -> float:
        return self.ranks * self.memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Seconds of a step; communication is what computing does not hide."""

    compute: float
    tensor: float
    expert: float
    context: float
    fsdp: float
    pipeline: float  # the bubble, and sending between stages
    optimizer: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    layout: Layout
    memory: Memory
    time: Time
    fits: bool
    tokens_per_card: float  # per second


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    model: ModelShape
    cluster: Cluster
    settings: Settings
    rows: list[Row]  # all that fit, fastest first, then those that do not, smallest first
    problem: str | None  # why nothing fits

    @property
    def feasible(self) -> list[Row]:
        return [row for row in self.rows if row.fits]

    def rank(self, layout: Layout) -> int | None:
        """1: the fastest; None: it does not fit."""
        return next((n for n, row in enumerate(self.feasible, 1) if row.layout == layout), None)


# ---- time


def _speed(cluster: Cluster, settings: Settings, span: int) -> float:
    """Bytes per second within a group of ranks whose first and last are `span` apart."""
    hardware = cluster.hardware
    return (hardware.link if span <= hardware.domain else hardware.network) * settings.comm_efficiency


def time_of(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings) -> Time:
    """Of the slowest stage, one microbatch after the other (1F1B), and of the fullest rank's update."""
    slowest = max((_stage_time(model, layout, cluster, settings, s) for s in range(layout.pp)), key=lambda t: t.total)
    micro = settings.batch // layout.dp
    sent = 2 * settings.seq / layout.cp * model.hidden / layout.tp * settings.compute if layout.pp > 1 else 0
    sending = micro * sent / _speed(cluster, settings, cluster.ranks)
    return replace(
        slowest,
        compute=slowest.compute * micro,
        tensor=slowest.tensor * micro,
        expert=slowest.expert * micro,
        context=slowest.context * micro,
        fsdp=slowest.fsdp * micro,
        pipeline=slowest.total * (layout.pp - 1) + sending,
        optimizer=_update_time(model, layout, cluster, settings),
    )


def _update_time(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings) -> float:
    """AdamW reads weight, gradient and moments, and writes all but the gradient."""
    kept = max(held(stage_weights(model, layers), layout) for layers in stages(model, layout.pp))
    moved = 2 * settings.weight + settings.gradient + 4 * settings.moment
    update = kept * moved / cluster.hardware.memory_bandwidth
    return max(update, 2 * kept * settings.moment / cluster.hardware.host) if layout.swap else update


def _stage_time(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings, stage: int) -> Time:
    """One microbatch, forward and backward."""
    layers = stages(model, layout.pp)[stage]
    tokens = settings.seq / layout.cp
    rate = cluster.hardware.flops * cluster.hardware.efficiency
    load = fullest(model, layout, settings)
    forwards, size = FORWARDS if settings.checkpoint else 1, settings.compute
    flops = 0.0
    for i, count in model.kinds(layers).items():
        work = model.layer_work(i, settings.seq, forwards)
        flops += count * tokens * (work.split / layout.tp + work.whole + work.experts / layout.tp * load)
    if stage == layout.pp - 1:
        flops += tokens * model.head_work() / layout.tp
    compute = flops / rate
    with_experts = sum(model.has_experts(i) for i in layers)

    def speed(span: int) -> float:
        return _speed(cluster, settings, span)

    def away(n: int) -> float:
        return (n - 1) / n

    passes = forwards + 1
    hidden = tokens * model.hidden * size
    tensor = len(layers) * passes * 4 * hidden * away(layout.tp) / speed(layout.tp)
    rows = hidden / layout.tp * model.chosen * load
    expert = with_experts * passes * 2 * rows * away(layout.ep) / speed(layout.ep)
    keys = model.kv_rank + model.rope + model.index_dim if model.latent else 2 * model.kv_heads * model.head_dim
    context = len(layers) * passes * settings.seq * keys * size * away(layout.cp) / speed(layout.tp * layout.cp)
    weights = stage_weights(model, layers)
    moved = (weights.split / layout.tp + weights.whole) * away(layout.dp * layout.cp)
    moved += weights.experts / layout.ep * away(layout.stage // layout.ep)
    fsdp = moved * (2 * size + settings.gradient) / speed(layout.stage)
    return Time(
        compute=compute,
        tensor=tensor,
        expert=expert,
        context=context,
        fsdp=max(0.0, fsdp - compute),
        pipeline=0.0,
        optimizer=0.0,
    )


# ---- the plan


def make_plan(model: ModelShape, cluster: Cluster, settings: Settings) -> Plan:
    counts = {"cards": cluster.cards, "dies": cluster.dies, "seq": settings.seq, "batch": settings.batch}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: at least 1")
    if cluster.memory <= 0:
        raise ValueError(f"memory is {cluster.memory} GB: it must be positive")
    rows = [_row(model, layout, cluster, settings) for layout in layouts(model, cluster.ranks, settings)]
    if not rows:
        raise ValueError(
            f"{model.name} on {cluster.ranks} ranks: no layout divides {model.heads} heads, {settings.seq} tokens and "
            f"{settings.batch} sequences evenly, with a sequence of each data-parallel rank for each pipeline stage"
        )
    rows.sort(key=lambda row: (not row.fits, -row.tokens_per_card if row.fits else row.memory.total))
    problem = _problem(model, cluster, settings, rows)
    return Plan(model=model, cluster=cluster, settings=settings, rows=rows, problem=problem)


def _row(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings) -> Row:
    memory, time = memory_of(model, layout, settings), time_of(model, layout, cluster, settings)
    return Row(
        layout=layout,
        memory=memory,
        time=time,
        fits=memory.total <= cluster.memory,
        tokens_per_card=settings.batch * settings.seq / time.total / cluster.cards,
    )


def _problem(model: ModelShape, cluster: Cluster, settings: Settings, rows: list[Row]) -> str | None:
    if rows[0].fits:
        return None
    need = settings.needed(model.parameters) / GB
    if need > cluster.total:
        without = settings.needed(model.parameters - model.layers * model.indexer) / GB
        aside = f" ({without:.0f} GB without the indexers)" if model.indexer else ""
        return (
            f"{settings.states} weights and gradients alone take {need:.0f} GB{aside}; "
            f"{cluster.cards} cards have {cluster.total:.0f} GB"
        )
    least = rows[0]
    parts: dict[str, Any] = asdict(least.memory)
    largest = max(parts, key=parts.__getitem__)
    return (
        f"the smallest layout, {least.layout}, needs {least.memory.total:.1f} GB of a rank's {cluster.memory:.0f}, "
        f"most of it {largest} ({parts[largest]:.1f} GB)"
    )
