"""Estimate the seconds of a training step: compute, communication that compute does not hide, and the update.

The time of compute is the FLOPs of a rank divided by the rate that it reaches, that of communication the bytes that a
rank receives divided by a bandwidth. Latencies and the time to launch kernels are not counted.
"""

from dataclasses import asdict, dataclass, replace

from whorl.plan.hardware import Cluster
from whorl.plan.layout import Parallelism, PlanSettings, peak_expert_load, sharded_parameters, stage_weights, stages
from whorl.plan.model_shape import FORWARDS, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """The seconds of a step; communication counts only where compute does not hide it."""

    compute: float
    tensor: float
    expert: float
    context: float
    fsdp: float
    pipeline: float  # the bubble, and the transfers between stages
    optimizer: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def _speed(cluster: Cluster, settings: PlanSettings, span: int) -> float:
    """Return the bytes per second that a rank reaches in a group that lies within `span` consecutive ranks."""
    hardware = cluster.hardware
    return (hardware.link if span <= hardware.domain else hardware.network) * settings.comm_efficiency


def time_of(model: ModelShape, layout: Parallelism, cluster: Cluster, settings: PlanSettings) -> Time:
    """Return the time of a step with the schedule 1F1B.

    It is the time of all micro-batches in the slowest stage, the bubble of pp - 1 more of them, the transfers between
    stages (activations and their gradients), and the update of the rank with most parameters.
    """
    slowest = max((_stage_time(model, layout, cluster, settings, s) for s in range(layout.pp)), key=lambda t: t.total)
    micro = settings.batch // layout.dp
    stage_bytes = 2 * settings.seq / layout.cp * model.hidden / layout.tp * settings.compute if layout.pp > 1 else 0
    sending = micro * stage_bytes / _speed(cluster, settings, cluster.ranks)
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


def _update_time(model: ModelShape, layout: Parallelism, cluster: Cluster, settings: PlanSettings) -> float:
    """Return the seconds of AdamW, which reads weight, gradient and moments and writes all but the gradient.

    Swapped moments also move over the host link, both ways at once; the slower of the two counts.
    """
    parameters = max(sharded_parameters(stage_weights(model, layers), layout) for layers in stages(model, layout.pp))
    bytes_per_parameter = 2 * settings.weight + settings.gradient + 4 * settings.moment
    update = parameters * bytes_per_parameter / cluster.hardware.memory_bandwidth
    return max(update, 2 * parameters * settings.moment / cluster.hardware.host) if layout.swap else update


def _stage_time(model: ModelShape, layout: Parallelism, cluster: Cluster, settings: PlanSettings, stage: int) -> Time:
    """Return the seconds of one micro-batch in one stage, forward and backward."""
    layers = stages(model, layout.pp)[stage]
    tokens = settings.seq / layout.cp
    rate = cluster.hardware.flops * cluster.hardware.efficiency
    load = peak_expert_load(model, layout, settings)
    forwards, size = FORWARDS if settings.checkpoint else 1, settings.compute
    flops = 0.0
    for i, count in model.kinds(layers).items():
        work = model.layer_work(i, settings.seq, forwards)
        flops += count * tokens * (work.split / layout.tp + work.replicated + work.experts / layout.tp * load)
    if stage == layout.pp - 1:
        flops += tokens * model.head_work() / layout.tp
    compute = flops / rate
    with_experts = sum(model.has_experts(i) for i in layers)

    def speed(span: int) -> float:
        return _speed(cluster, settings, span)

    def remote_share(n: int) -> float:
        """Return the share of data that comes from other ranks in a group of n."""
        return (n - 1) / n

    # Every forward and the backward communicate. TP: an all-gather and a reduce-scatter, for the attention and for the
    # feed-forward layer. EP: dispatch and combine. CP: the keys of the whole sequence. FSDP: weights are gathered in
    # forward and in backward, and gradients are reduced.
    passes = forwards + 1
    hidden = tokens * model.hidden * size
    tensor = len(layers) * passes * 4 * hidden * remote_share(layout.tp) / speed(layout.tp)
    dispatched = hidden / layout.tp * model.chosen * load
    expert = with_experts * passes * 2 * dispatched * remote_share(layout.ep) / speed(layout.ep)
    keys = model.kv_rank + model.rope + model.index_dim if model.latent else 2 * model.kv_heads * model.head_dim
    context = len(layers) * passes * settings.seq * keys * size * remote_share(layout.cp) / speed(layout.tp * layout.cp)
    weights = stage_weights(model, layers)
    gathered = (weights.split / layout.tp + weights.replicated) * remote_share(layout.dp * layout.cp)
    gathered += weights.experts / layout.ep * remote_share(layout.stage // layout.ep)
    fsdp = gathered * (2 * size + settings.gradient) / speed(layout.stage)
    return Time(
        compute=compute,
        tensor=tensor,
        expert=expert,
        context=context,
        fsdp=max(0.0, fsdp - compute),
        pipeline=0.0,
        optimizer=0.0,
    )
