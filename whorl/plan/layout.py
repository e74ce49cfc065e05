"""How a model is divided over ranks: the layouts to consider, the pipeline stages, and a rank's share of the weights.

A layout is a `Parallelism`: one choice of the degrees of each kind of parallelism.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from whorl.plan.model_shape import ModelShape, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What is trained and how; the defaults are those of the 671b recipe.

    weight, gradient, moment and compute are bytes of one element, with its share of a scale where it has one.
    """

    seq: int
    batch: int  # sequences of one optimizer step, over all ranks
    imbalance: float = 0.25  # standard deviation of one expert's load, as a share of its mean
    reserve: float = 2.0  # GB outside the allocator: runtime and communication buffers
    comm_efficiency: float = 0.6  # the share of a bandwidth that collectives reach
    weight: int = 4
    gradient: int = 4
    moment: float = 4
    compute: int = 2
    checkpoint: bool = True  # full activation checkpointing: save only the input of a layer and recompute the layer
    fused: bool = True  # fused attention; otherwise small operators that store the scores of all pairs
    masked: bool = True  # the device has a kernel for masked attention, which is used for short sequences
    chunk: int = 1024  # tokens whose cross entropy is computed at once; 0: all tokens
    ring: int = 3  # buckets of a swapped optimizer that are on the device at once

    def needed(self, parameters: int) -> float:
        """Return the bytes of weights and gradients, which must be on the devices in every layout."""
        return parameters * (self.weight + self.gradient)

    @property
    def states(self) -> str:
        """Return the dtypes of weights, gradients and moments as text, as one name where they are the same."""
        names: dict[float, str] = {4: "fp32", 2: "bf16"}
        dtypes = [names.get(size, f"{size:g}-byte") for size in (self.weight, self.gradient, self.moment)]
        return dtypes[0] if len(set(dtypes)) == 1 else "/".join(dtypes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The degrees of a layout: ranks = pp * tp * cp * dp.

    dp is data parallelism by FSDP. Experts are spread over ep of the tp * cp * dp ranks of a pipeline stage. swap: the
    moments of the optimizer live in host memory.
    """

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    swap: bool

    @property
    def stage(self) -> int:
        """Return the number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def shards(self) -> int:
        """Return the number of ranks that FSDP shards weights over; 1 means that there is no FSDP."""
        return self.dp * self.cp

    def __str__(self) -> str:
        parts = [f"PP{self.pp} TP{self.tp} CP{self.cp} DP{self.dp} EP{self.ep}"]
        return " ".join([*parts, "swap"] if self.swap else parts)


def powers(limit: int) -> list[int]:
    """Return the powers of two that divide `limit`, and `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length()) if limit % 2**i == 0} | {limit})


def layouts(model: ModelShape, ranks: int, settings: PlanSettings) -> Iterator[Parallelism]:
    """Yield every layout that divides evenly, as TorchTitan requires, and gives each pipeline stage a layer.

    A layout has at least as many micro-batches, of one sequence each, as stages: torch refuses 1F1B with fewer.
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
    """Return the layers of each pipeline stage as TorchTitan divides them: embedding and head count as a layer each."""
    if pp == 1:
        return [range(model.layers)]
    size, remainder = divmod(model.layers + 2, pp)
    counts = [size + (i < remainder) for i in range(pp)]
    counts[0] -= 1  # the embedding; the head is cut off at the end of the last range
    starts = [min(sum(counts[:i]), model.layers) for i in range(pp)]
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, model.layers])]


def peak_expert_load(model: ModelShape, layout: Parallelism, settings: PlanSettings) -> float:
    """Estimate the load of the busiest expert-parallel rank, divided by the mean load.

    A rank's load is the sum of the loads of its experts, which are taken as independent. The estimate is the expected
    maximum of the loads of ep ranks.
    """
    if layout.ep == 1 or not model.experts:
        return 1.0
    return 1 + settings.imbalance * math.sqrt(2 * math.log(layout.ep) / (model.experts / layout.ep))


def sharded_parameters(weights: Weights, layout: Parallelism) -> float:
    """Return how many of a stage's parameters a rank stores.

    They are sharded over all ranks of the stage, except that what TP replicates is sharded only by FSDP.
    """
    return (weights.split / layout.tp + weights.replicated) / layout.shards + weights.experts / layout.stage


def gathered_parameters(weights: Weights, layout: Parallelism) -> float:
    """Return how many parameters a rank has in memory while it computes with them, after FSDP has gathered them.

    Without expert parallelism TP shards the experts.
    """
    expert_ranks = layout.ep if layout.ep > 1 else layout.tp
    return weights.split / layout.tp + weights.replicated + weights.experts / expert_ranks


def stage_weights(model: ModelShape, layers: range) -> Weights:
    """Return the weights of a pipeline stage, with the embedding and the head where they belong to it."""
    total = sum((model.layer(i).times(count) for i, count in model.kinds(layers).items()), Weights())
    return total + embedding_weights(model, layers) + head_weights(model, layers)


def embedding_weights(model: ModelShape, layers: range) -> Weights:
    """Return the weights of the embedding if the stage with these layers has it, else none."""
    return Weights(split=model.embedding if layers.start == 0 else 0)


def head_weights(model: ModelShape, layers: range) -> Weights:
    """Return the weights of the head if the stage has it; a head tied to an embedding of the same stage adds none."""
    is_shared = model.tied and layers.start == 0
    return Weights(split=model.embedding if layers.stop == model.layers and not is_shared else 0)
