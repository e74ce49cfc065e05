"""Which layouts of a model fit a cluster, and how fast they would train: arithmetic alone, no torch.

Memory is per rank (one die of a card), GB of 10**9 bytes. `plan_report.assumptions` says what the numbers rest on.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from whorl.titan.model_shape import PASSES, ModelShape, Weights

GB = 1e9
WEIGHT, GRADIENT, MOMENTS, COMPUTE = 4, 4, 8, 2  # bytes: fp32 weights, gradients, two moments; bf16 compute
UPDATE_BYTES = 28  # an element of AdamW reads weight, gradient and moments, and writes all but the gradient
LOGIT_BYTES = 10  # bf16 logits, fp32 softmax, fp32 gradient


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
class Settings:
    seq: int
    batch: int  # sequences of a step, over all ranks
    imbalance: float = 0.25  # spread of the load of one expert, as a share of its mean
    reserve: float = 2.0  # GB: runtime, communication buffers
    ring: float = 0.8  # GB: the swap optimizer's buffers
    comm_efficiency: float = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks = pp * tp * cp * dp; dp is FSDP. Experts are shared by ep of the tp * cp * dp ranks of a stage."""

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    swap: bool

    @property
    def stage(self) -> int:
        return self.tp * self.cp * self.dp

    def __str__(self) -> str:
        parts = [f"PP{self.pp} TP{self.tp} CP{self.cp} DP{self.dp} EP{self.ep}"]
        return " ".join([*parts, "swap"] if self.swap else parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """GB of the fullest rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # gathered weights, unreduced gradients, the ring, the reserve

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


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


def powers(limit: int) -> list[int]:
    """Powers of two that divide `limit`, and `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length()) if limit % 2**i == 0} | {limit})


def layouts(model: ModelShape, ranks: int, settings: Settings) -> Iterator[Layout]:
    """Those that divide evenly, as TorchTitan asks."""
    for pp in powers(ranks):
        for tp in powers(ranks // pp):
            for cp in powers(ranks // pp // tp):
                dp = ranks // pp // tp // cp
                if pp > model.layers or model.heads % tp or (model.kv_heads and model.kv_heads % tp):
                    continue
                if settings.seq % (tp * 2 * cp if cp > 1 else tp) or settings.batch % dp:
                    continue
                for ep in powers(tp * cp * dp) if model.experts else [1]:
                    if ep == 1 or model.experts % ep == 0:
                        for swap in (False, True):
                            yield Layout(pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, swap=swap)


def stages(model: ModelShape, pp: int) -> list[range]:
    """Layers of each stage; the first ones have one more, since their layers without experts are light."""
    size, more = divmod(model.layers, pp)
    starts = [i * size + min(i, more) for i in range(pp + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def fullest(model: ModelShape, layout: Layout, settings: Settings) -> float:
    """Load of the fullest expert-parallel rank over the mean: the largest of ep sums of independent loads."""
    if layout.ep == 1 or not model.experts:
        return 1.0
    return 1 + settings.imbalance * math.sqrt(2 * math.log(layout.ep) / (model.experts / layout.ep))


def held(weights: Weights, layout: Layout) -> float:
    """Parameters that a rank keeps: everything is sharded over its stage, but for what TP replicates."""
    shards = layout.dp * layout.cp
    return (weights.split / layout.tp + weights.whole) / shards + weights.experts / layout.stage


def gathered(weights: Weights, layout: Layout) -> float:
    """Parameters that a rank computes with."""
    return weights.split / layout.tp + weights.whole + weights.experts / layout.ep


def stage_weights(model: ModelShape, layers: range) -> Weights:
    found = sum((model.layer(i).times(count) for i, count in model.kinds(layers).items()), Weights())
    if layers.start == 0:
        found += Weights(split=model.embedding)
    if layers.stop == model.layers and not (model.tied and layers.start == 0):
        found += Weights(split=model.embedding)
    return found


# ---- memory


def layer_peak(model: ModelShape, layout: Layout, settings: Settings) -> float:
    """Bytes of what one layer's backward holds at once: its attention's or its experts' tensors and gradients."""
    tokens = settings.seq / layout.cp
    hidden = 4 * tokens * model.hidden * COMPUTE  # residual, normalised input and their gradients, gathered over TP
    if model.index_heads:
        width = model.heads / layout.tp * (2 * model.kv_rank + model.rope)
        index = model.index_heads * model.index_dim * 2 * COMPUTE
        selection = min(model.index_topk, settings.seq) * (4 + 2 * 4)  # indices; target and its gradient
        attention = tokens * (width * 2 * COMPUTE + index + selection)
    elif model.latent:
        attention = tokens * model.heads / layout.tp * (2 * (model.nope + model.rope) + 2 * model.value) * 2 * COMPUTE
    else:
        attention = tokens * (2 * model.heads + 2 * model.kv_heads) / layout.tp * model.head_dim * 2 * COMPUTE
    ffn = tokens * 3 * model.ffn / layout.tp * 2 * COMPUTE
    if model.experts:
        rows = tokens / layout.tp * model.chosen * fullest(model, layout, settings)
        ffn = max(ffn if model.dense else 0, rows * (2 * model.hidden + 3 * model.expert_ffn) * 2 * COMPUTE)
    return hidden + max(attention, ffn)


def memory_of(model: ModelShape, layout: Layout, settings: Settings) -> Memory:
    """Of the stage that needs most."""
    return max((_stage_memory(model, layout, settings, s) for s in range(layout.pp)), key=lambda m: m.total)


def _stage_memory(model: ModelShape, layout: Layout, settings: Settings, stage: int) -> Memory:
    layers = stages(model, layout.pp)[stage]
    kept = held(stage_weights(model, layers), layout)
    tokens = settings.seq / layout.cp
    in_flight = min(layout.pp - stage, settings.batch // layout.dp)
    inputs = len(layers) * tokens * model.hidden / layout.tp * COMPUTE * in_flight
    logits = tokens * model.vocab / layout.tp * LOGIT_BYTES if stage == layout.pp - 1 else 0
    block = max(gathered(model.layer(i), layout) for i in model.kinds(layers))
    # This block and the next in bf16; the gradients of one before and after they are reduced.
    working = block * (2 * COMPUTE + COMPUTE + GRADIENT)
    return Memory(
        parameters=kept * WEIGHT / GB,
        gradients=kept * GRADIENT / GB,
        optimizer=(0.0 if layout.swap else kept * MOMENTS / GB),
        activations=(inputs + max(logits, layer_peak(model, layout, settings))) / GB,
        buffers=working / GB + settings.reserve + (settings.ring if layout.swap else 0),
    )


# ---- time


def _speed(cluster: Cluster, settings: Settings, span: int) -> float:
    """Bytes per second within a group of ranks whose first and last are `span` apart."""
    hardware = cluster.hardware
    return (hardware.link if span <= hardware.domain else hardware.network) * settings.comm_efficiency


def time_of(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings) -> Time:
    """Of the slowest stage, one microbatch after the other (1F1B), and of the fullest rank's update."""
    slowest = max((_stage_time(model, layout, cluster, settings, s) for s in range(layout.pp)), key=lambda t: t.total)
    micro = settings.batch // layout.dp
    sent = 2 * settings.seq / layout.cp * model.hidden / layout.tp * COMPUTE if layout.pp > 1 else 0
    sending = micro * sent / _speed(cluster, settings, cluster.ranks)
    return replace(
        slowest,
        compute=slowest.compute * micro,
        tensor=slowest.tensor * micro,
        expert=slowest.expert * micro,
        context=slowest.context * micro,
        fsdp=slowest.fsdp * micro,
        pipeline=slowest.total * (layout.pp - 1) + sending,
        optimizer=_update_time(model, layout, cluster),
    )


def _update_time(model: ModelShape, layout: Layout, cluster: Cluster) -> float:
    kept = max(held(stage_weights(model, layers), layout) for layers in stages(model, layout.pp))
    update = kept * UPDATE_BYTES / cluster.hardware.memory_bandwidth
    return max(update, kept * MOMENTS / cluster.hardware.host) if layout.swap else update


def _stage_time(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings, stage: int) -> Time:
    """One microbatch, forward and backward."""
    layers = stages(model, layout.pp)[stage]
    tokens = settings.seq / layout.cp
    rate = cluster.hardware.flops * cluster.hardware.efficiency
    load = fullest(model, layout, settings)
    flops = 0.0
    for i, count in model.kinds(layers).items():
        work = model.layer_work(i, settings.seq)
        flops += count * tokens * (work.split / layout.tp + work.whole + work.experts / layout.tp * load)
    if stage == layout.pp - 1:
        flops += tokens * model.head_work() / layout.tp
    compute = flops / rate
    with_experts = sum(model.has_experts(i) for i in layers)

    def speed(span: int) -> float:
        return _speed(cluster, settings, span)

    def away(n: int) -> float:
        return (n - 1) / n

    hidden = tokens * model.hidden * COMPUTE
    tensor = len(layers) * PASSES * 4 * hidden * away(layout.tp) / speed(layout.tp)
    rows = hidden / layout.tp * model.chosen * load
    expert = with_experts * PASSES * 2 * rows * away(layout.ep) / speed(layout.ep)
    keys = model.kv_rank + model.rope + model.index_dim if model.latent else 2 * model.kv_heads * model.head_dim
    context = len(layers) * PASSES * settings.seq * keys * COMPUTE * away(layout.cp) / speed(layout.tp * layout.cp)
    weights = stage_weights(model, layers)
    moved = (weights.split / layout.tp + weights.whole) * away(layout.dp * layout.cp)
    moved += weights.experts / layout.ep * away(layout.stage // layout.ep)
    fsdp = moved * (2 * COMPUTE + GRADIENT) / speed(layout.stage)
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
            f"{settings.batch} sequences evenly"
        )
    rows.sort(key=lambda row: (not row.fits, -row.tokens_per_card if row.fits else row.memory.total))
    return Plan(model=model, cluster=cluster, settings=settings, rows=rows, problem=_problem(model, cluster, rows))


def _row(model: ModelShape, layout: Layout, cluster: Cluster, settings: Settings) -> Row:
    memory, time = memory_of(model, layout, settings), time_of(model, layout, cluster, settings)
    return Row(
        layout=layout,
        memory=memory,
        time=time,
        fits=memory.total <= cluster.memory,
        tokens_per_card=settings.batch * settings.seq / time.total / cluster.cards,
    )


def _problem(model: ModelShape, cluster: Cluster, rows: list[Row]) -> str | None:
    if rows[0].fits:
        return None
    need = model.parameters * (WEIGHT + GRADIENT) / GB
    if need > cluster.total:
        without = (model.parameters - model.layers * model.indexer) * (WEIGHT + GRADIENT) / GB
        aside = f" ({without:.0f} GB without the indexers)" if model.indexer else ""
        return (
            f"fp32 weights and gradients alone take {need:.0f} GB{aside}; "
            f"{cluster.cards} cards have {cluster.total:.0f} GB"
        )
    least = rows[0]
    parts: dict[str, Any] = asdict(least.memory)
    largest = max(parts, key=parts.__getitem__)
    return (
        f"the smallest layout, {least.layout}, needs {least.memory.total:.1f} GB of a rank's {cluster.memory:.0f}, "
        f"most of it {largest} ({parts[largest]:.1f} GB)"
    )
