"""List the layouts in which a cluster can serve a model: memory of a rank, room for tokens, and a limit of the speed.

The limit is a roofline: bytes over bandwidths and FLOPs over their peak, of a decode step whose requests are alike in
length and choose experts independently. Latencies, launches and prompts are not counted, so a measured speed is lower.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from whorl.plan.hardware import HARDWARE, Hardware
from whorl.plan.layout import powers
from whorl.plan.memory import GB
from whorl.plan.model_shape import ModelShape, read_model
from whorl.plan.options import ServingOptions

ENDS: Final = 2  # bytes of an element of the embedding and the head, which quantised checkpoints leave in 16 bits
KINDS: Final = {"H200": "h200", "910C": "a3"}
WEIGHTS: Final = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53125}  # with a 16-bit scale for 64 columns
CACHES: Final = {"bf16": 2.0, "fp8": 1.0}
ACTIVATION: Final = 2  # bytes of an element that ranks exchange
CACHE_SHARE: Final = 0.9  # of what the weights leave; the rest is for activations, as in the engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to serve: `engines` engines of `ranks` ranks each.

    tp: ranks that share the layers; ep: ranks that divide the experts, 1: they are shared like the layers. weights,
    cache: GB of a rank. tokens: that the caches of all engines hold. batch: requests of an engine that decode at once.
    alone, all: tokens a second of one request by itself, and of all engines.
    """

    tp: int
    ep: int
    ranks: int
    engines: int
    weights: float
    cache: float
    tokens: int
    batch: int
    alone: float
    all: float

    @property
    def options(self) -> str:
        """The options of `whorl serve` for one engine."""
        parts = [f"--tp {self.tp}"] if self.tp > 1 else []
        return " ".join([*parts, *([f"--ep {self.ep}"] if self.ep > 1 else [])]) or "one rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """The layouts that fit, the fastest first. problem: why there is none. least: GB of a rank of the smallest layout
    that does not fit."""

    model: str
    kind: str
    cards: int
    layouts: tuple[Layout, ...]
    problem: str | None = None


def weight_bytes(model: ModelShape, tp: int, element_bytes: float = 2, *, ep: int = 1) -> float:
    """Return the bytes of the weights on a rank of tensor parallelism; element_bytes: of a weight of a layer. ep: ranks
    that divide the experts; 1: experts are shared like the other weights."""
    ends = model.embedding * (1 if model.tied else 2) / tp + model.hidden
    layers = 0.0
    for index, count in model.kinds(range(model.layers)).items():
        weights = model.layer(index)
        layers += count * (weights.split / tp + weights.experts / max(tp, ep) + weights.replicated)
    return layers * element_bytes + ends * max(ENDS, element_bytes)


def cache_bytes(model: ModelShape, tp: int, element_bytes: float = 2) -> float:
    """Return the bytes that a token takes in the KV cache of a rank, over all layers.

    Every rank stores whole latents (multi-head latent attention) and whole keys of an indexer; key and value heads are
    split over the ranks, and each rank stores at least one of them.
    """
    if model.latent:
        return model.layers * (model.kv_rank + model.rope + model.index_dim) * element_bytes
    return 2 * model.layers * max(model.kv_heads / tp, 1) * model.head_dim * element_bytes


def build_serving_plan(options: ServingOptions) -> ServingPlan:
    """Return the plan; ValueError for an unknown kind, format or model.

    print(render_serving(build_serving_plan(ServingOptions(serve="deepseek-v3.2", cards=8, weights="fp8")), top=10))
    """
    if options.serve is None or options.cards is None:
        raise ValueError("plan: give --serve MODEL and --cards N")
    for name, value, known in (
        ("kind", options.kind, KINDS),
        ("weights", options.weights, WEIGHTS),
        ("kv", options.kv, CACHES),
    ):
        if value not in known:
            raise ValueError(f"plan: {name} is {value!r}, expected {' or '.join(known)}")
    model, hardware = read_model(options.serve), HARDWARE[KINDS[options.kind]]
    ranks = options.cards * hardware.dies
    fitting = [
        layout for tp, ep in _degrees(model, ranks) if (layout := _layout(model, hardware, ranks, tp, ep, options))
    ]
    plan = ServingPlan(model=model.name, kind=options.kind, cards=options.cards, layouts=())
    if fitting:
        return replace(plan, layouts=tuple(sorted(fitting, key=lambda layout: -layout.all)))
    least = min(weight_bytes(model, tp, WEIGHTS[options.weights], ep=ep) for tp, ep in _degrees(model, ranks)) / GB
    problem = (
        f"no layout fits: a rank needs {least:.0f} GB for weights and room for {options.seq} tokens, and has "
        f"{hardware.memory:.0f} GB; give more cards, or weights of fewer bits (--weights)"
    )
    return replace(plan, problem=problem)


def _degrees(model: ModelShape, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the degrees of tensor and expert parallelism of engines that whole numbers of fill the ranks."""
    for size in powers(ranks):
        if model.heads % size == 0:
            yield size, 1
        if size > 1 and model.experts and model.experts % size == 0:
            yield 1, size
            if model.heads % size == 0:
                yield size, size


def _layout(
    model: ModelShape, hardware: Hardware, ranks: int, tp: int, ep: int, options: ServingOptions
) -> Layout | None:
    """Return a layout; None if a rank has no room for one request."""
    size = max(tp, ep)
    weights = weight_bytes(model, tp, WEIGHTS[options.weights], ep=ep)
    cache = CACHE_SHARE * (hardware.memory * GB - weights)
    tokens = int(cache // cache_bytes(model, tp, CACHES[options.kv]))
    batch = min(options.batch, tokens // options.seq)
    if batch < 1:
        return None
    return Layout(
        tp=tp,
        ep=ep,
        ranks=size,
        engines=ranks // size,
        weights=weights / GB,
        cache=cache / GB,
        tokens=tokens * (ranks // size),
        batch=batch,
        alone=1 / step_seconds(model, hardware, tp, ep, 1, options),
        all=ranks // size * batch / step_seconds(model, hardware, tp, ep, batch, options),
    )


def step_seconds(model: ModelShape, hardware: Hardware, tp: int, ep: int, batch: int, options: ServingOptions) -> float:
    """Return the least seconds of a decode step of one engine: of its reading or its products, and of its exchanges."""
    element, size = WEIGHTS[options.weights], max(tp, ep)
    read = model.embedding / tp * max(ENDS, element)  # the head
    read += batch * _read_cache(model, tp, options)
    flops, sent, share = 2 * batch * model.embedding / tp, 0.0, (size - 1) / size
    hidden = batch * model.hidden * ACTIVATION
    for index, count in model.kinds(range(model.layers)).items():
        weights = model.layer(index)
        used = 1 - (1 - model.chosen / model.experts) ** batch if weights.experts else 0.0
        read += count * element * (weights.split / tp + weights.replicated + used * weights.experts / size)
        active = weights.experts * model.chosen / model.experts if weights.experts else 0.0
        flops += count * 2 * batch * (weights.split / tp + weights.replicated + active / size)
        num_sums = (1 if weights.experts and ep > 1 else 2) if tp > 1 else 0
        sent += count * num_sums * 2 * hidden * share
        if weights.experts and ep > 1:  # rows of choices to the ranks of their tokens, then their sums to all
            sent += count * share * hidden * (model.chosen / size + 1)
    speed = hardware.link if size <= hardware.domain else hardware.network
    return max(read / hardware.memory_bandwidth, flops / hardware.flops) + sent / speed


def _read_cache(model: ModelShape, tp: int, options: ServingOptions) -> float:
    """Return the bytes of the cache that a step reads for one request; an indexer selects the latents to read."""
    if not model.index_topk:
        return options.seq * cache_bytes(model, tp, CACHES[options.kv])
    latents = min(options.seq, model.index_topk) * (model.kv_rank + model.rope)
    return model.layers * (latents + options.seq * model.index_dim) * CACHES[options.kv]


def serving_dict(plan: ServingPlan, top: int) -> dict[str, Any]:
    """Return the plan with its first `top` layouts, for programs."""
    rows = [{**asdict(layout), "options": layout.options} for layout in plan.layouts[:top]]
    return {**asdict(plan), "layouts": rows}


def render_serving(plan: ServingPlan, top: int) -> str:
    """Return the plan for people, with its first `top` layouts."""
    head = f"{plan.model} on {plan.cards} x {plan.kind}"
    if plan.problem is not None:
        return f"{head}: {plan.problem}"
    titles = ("engine", "engines", "weights GB", "cache GB", "tokens", "requests", "tok/s alone", "tok/s all")
    rows = [
        (
            *(layout.options, str(layout.engines), f"{layout.weights:.1f}", f"{layout.cache:.1f}"),
            *(f"{layout.tokens:,}", str(layout.batch), f"{layout.alone:,.0f}", f"{layout.all:,.0f}"),
        )
        for layout in plan.layouts[:top]
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (titles, *rows)]
    return "\n".join([head, *lines, "Weights and cache of a rank. Speeds are limits: bytes and FLOPs, nothing else."])
