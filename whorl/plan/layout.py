"""Who holds what: layouts of ranks, pipeline stages, and a rank's share of the weights."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from whorl.plan.model_shape import ModelShape, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """As in the recipe of the whole model, unless said; weight, gradient, moment, compute: bytes of an element."""

    seq: int
    batch: int  # sequences of a step, over all ranks
    imbalance: float = 0.25  # spread of the load of one expert, as a share of its mean
    reserve: float = 2.0  # GB that the allocator does not see: runtime, communication buffers
    comm_efficiency: float = 0.6
    weight: int = 4
    gradient: int = 4
    moment: int = 4
    compute: int = 2
    checkpoint: bool = True  # a layer keeps its input alone, and is computed again in backward
    fused: bool = True  # attention; otherwise small operators, with scores of all pairs
    masked: bool = True  # short sequences, where the device has a kernel that masks what is not chosen
    chunk: int = 1024  # tokens of the cross entropy at once; 0: all

    def needed(self, parameters: int) -> float:
        """Bytes of weights and gradients, which no setting takes off the device."""
        return parameters * (self.weight + self.gradient)

    @property
    def states(self) -> str:
        """What weights, gradients and moments are."""
        found = [{4: "fp32", 2: "bf16"}.get(n, f"{n}-byte") for n in (self.weight, self.gradient, self.moment)]
        return found[0] if len(set(found)) == 1 else "/".join(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
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

    @property
    def shards(self) -> int:
        """Ranks that FSDP shares weights among; 1: there is no FSDP."""
        return self.dp * self.cp

    def __str__(self) -> str:
        parts = [f"PP{self.pp} TP{self.tp} CP{self.cp} DP{self.dp} EP{self.ep}"]
        return " ".join([*parts, "swap"] if self.swap else parts)


def powers(limit: int) -> list[int]:
    """Powers of two that divide `limit`, and `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length()) if limit % 2**i == 0} | {limit})


def layouts(model: ModelShape, ranks: int, settings: PlanSettings) -> Iterator[Parallelism]:
    """Those that divide evenly, as TorchTitan asks, with a layer for each stage.

    And with a microbatch, which is one sequence, for each stage: torch refuses 1F1B with fewer.
    """
    for pp in powers(ranks):
        if not all(stages(model, pp)):
            continue
        for tp in powers(ranks // pp):
            for cp in powers(ranks // pp // tp):
                dp = ranks // pp // tp // cp
                if model.heads % tp or (model.kv_heads and model.kv_heads % tp):
                    continue
                if settings.seq % (tp * 2 * cp if cp > 1 else tp) or settings.batch % dp or settings.batch // dp < pp:
                    continue
                for ep in powers(tp * cp * dp) if model.experts else [1]:
                    if ep == 1 or model.experts % ep == 0:
                        for swap in (False, True):
                            yield Parallelism(pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, swap=swap)


def stages(model: ModelShape, pp: int) -> list[range]:
    """Layers of each stage, as TorchTitan cuts them: embedding and head count as a layer each."""
    if pp == 1:
        return [range(model.layers)]
    size, more = divmod(model.layers + 2, pp)
    counts = [size + (i < more) for i in range(pp)]
    counts[0] -= 1
    starts = [min(sum(counts[:i]), model.layers) for i in range(pp)]
    return [range(a, b) for a, b in itertools.pairwise([*starts, model.layers])]


def fullest(model: ModelShape, layout: Parallelism, settings: PlanSettings) -> float:
    """Load of the fullest expert-parallel rank over the mean: the largest of ep sums of independent loads."""
    if layout.ep == 1 or not model.experts:
        return 1.0
    return 1 + settings.imbalance * math.sqrt(2 * math.log(layout.ep) / (model.experts / layout.ep))


def held(weights: Weights, layout: Parallelism) -> float:
    """Parameters that a rank keeps: everything is sharded over its stage, but for what TP replicates."""
    return (weights.split / layout.tp + weights.whole) / layout.shards + weights.experts / layout.stage


def gathered(weights: Weights, layout: Parallelism) -> float:
    """Parameters that a rank computes with; TP cuts experts where expert parallelism does not spread them."""
    by = layout.ep if layout.ep > 1 else layout.tp
    return weights.split / layout.tp + weights.whole + weights.experts / by


def stage_weights(model: ModelShape, layers: range) -> Weights:
    found = sum((model.layer(i).times(count) for i, count in model.kinds(layers).items()), Weights())
    return found + embedding_weights(model, layers) + head_weights(model, layers)


def embedding_weights(model: ModelShape, layers: range) -> Weights:
    return Weights(split=model.embedding if layers.start == 0 else 0)


def head_weights(model: ModelShape, layers: range) -> Weights:
    """None of its own where the embedding, which it is tied to, is on the same stage."""
    is_shared = model.tied and layers.start == 0
    return Weights(split=model.embedding if layers.stop == model.layers and not is_shared else 0)
