"""What a rank's allocator holds at the peak of a step: weights and moments, and the rest by a walk of backward.

Backward goes from the head to the embedding: what a part has kept is free when it is through, its gradients stay.
`docs/training_plan.md` sets this next to what was measured.
"""

from dataclasses import dataclass, replace

from whorl.plan.layout import (
    Parallelism,
    PlanSettings,
    embedding_weights,
    fullest,
    gathered,
    head_weights,
    held,
    stage_weights,
    stages,
)
from whorl.plan.model_shape import ModelShape, Weights

GB = 1e9
RING = 3 * 2 * (1 << 25)  # elements: the swap optimizer's chunks on the device, of two moments
WIDE, INDEX = 4, 4  # bytes: fp32, int32
CROSSOVER = 6800  # keys up to which `choose_attention` masks, for 2048 chosen ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """GB of the fullest rank, at the peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # gathered weights, unreduced gradients, the ring of a swapped optimizer
    reserve: float  # not the allocator's

    @property
    def allocated(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> float:
        return self.allocated + self.reserve


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Bytes of an attention, a feed-forward layer, the head or the embedding, in the order of forward."""

    kept: float  # from forward to backward
    working: float  # of backward alone
    gradients: float
    buffers: float = 0.0  # FSDP's


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    activations: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.buffers


def peak(parts: list[Part], *, accumulates: bool = False) -> Peak:
    """accumulates: gradients of an earlier microbatch are there already."""
    kept, most = sum(part.kept for part in parts), Peak()
    gradients = sum(part.gradients for part in parts) if accumulates else 0.0
    for part in reversed(parts):
        gradients += 0 if accumulates else part.gradients
        now = Peak(activations=kept + part.working, gradients=gradients, buffers=part.buffers)
        most = max(most, now, key=lambda p: p.total)
        kept -= part.kept
    return most


def memory_of(model: ModelShape, layout: Parallelism, settings: PlanSettings) -> Memory:
    """Of the stage that needs most."""
    return max((stage_memory(model, layout, settings, s) for s in range(layout.pp)), key=lambda m: m.total)


def stage_memory(model: ModelShape, layout: Parallelism, settings: PlanSettings, stage: int) -> Memory:
    layers = stages(model, layout.pp)[stage]
    weights = held(stage_weights(model, layers), layout)
    parts = _Parts(model, layout, settings).of_stage(layers)
    microbatches = settings.batch // layout.dp
    others = min(layout.pp - stage, microbatches) - 1  # in flight besides the one in backward
    top = peak(parts, accumulates=microbatches > 1)
    # Without FSDP, whose units have theirs in turn, autocast keeps a copy of all weights.
    copies = weights * settings.compute if layout.shards == 1 and settings.compute != settings.weight else 0
    ring = RING * settings.moment if layout.swap else 0
    return Memory(
        parameters=weights * settings.weight / GB,
        gradients=top.gradients / GB,
        optimizer=0.0 if layout.swap else 2 * weights * settings.moment / GB,
        activations=(top.activations + others * sum(part.kept for part in parts)) / GB,
        buffers=(top.buffers + copies + ring) / GB,
        reserve=settings.reserve,
    )


class _Parts:
    """What the parts of a stage hold, with one sequence in a microbatch."""

    def __init__(self, model: ModelShape, layout: Parallelism, settings: PlanSettings) -> None:
        self.model, self.layout, self.settings = model, layout, settings
        self.size, self.accumulates = settings.compute, settings.batch // layout.dp > 1
        self.tokens = settings.seq / layout.cp
        # The residual is shared out over TP; what a projection takes has been gathered.
        self.whole = self.tokens * model.hidden * self.size
        self.stream = self.whole / layout.tp

    def of_stage(self, layers: range) -> list[Part]:
        """Each with what FSDP has gathered for it and, ahead of time, for the part whose turn is next."""
        kinds = {self.model.has_experts(i): (self.layer(i), self.model.layer(i)) for i in self.model.kinds(layers)}
        units = [kinds[self.model.has_experts(i)][0] for i in layers]
        weights = [kinds[self.model.has_experts(i)][1] for i in layers]
        if layers.stop == self.model.layers:
            units.append([self.head(head_weights(self.model, layers))])
            weights.append(Weights(split=self.model.embedding))
        following = [Weights(), *weights]  # backward does not look up embeddings again
        found = [
            replace(part, buffers=self.buffers(mine, ahead))
            for unit, mine, ahead in zip(units, weights, following, strict=False)
            for part in unit
        ]
        table = embedding_weights(self.model, layers)
        if not table.total:
            return found
        gradients = self.gradients(table)
        return [Part(kept=0, working=self.stream, gradients=gradients, buffers=self.unreduced(table)), *found]

    def gradients(self, weights: Weights) -> float:
        return held(weights, self.layout) * self.settings.gradient

    def unreduced(self, weights: Weights) -> float:
        """Gradients of a unit, as they are computed and as they are summed over ranks."""
        if self.layout.shards == 1:
            return 0.0
        return gathered(weights, self.layout) * (self.size + self.settings.gradient)

    def buffers(self, mine: Weights, ahead: Weights) -> float:
        if self.layout.shards == 1:
            return 0.0
        return gathered(mine + ahead, self.layout) * self.size + self.unreduced(mine)

    def head(self, weights: Weights) -> Part:
        vocab = self.model.vocab / self.layout.tp
        logits = self.tokens * vocab * self.size  # their gradient takes their place
        chunk = min(self.settings.chunk or self.tokens, self.tokens) * vocab * WIDE * 2
        hidden = self.stream + self.whole  # the norm's input and output; as much flows back
        return Part(kept=hidden + logits, working=hidden + chunk, gradients=self.gradients(weights))

    def layer(self, index: int) -> list[Part]:
        found = [self.attention(), self.feed_forward(index)]
        if not self.settings.checkpoint:
            return found
        # Of which only the input is kept: backward has all of it, and goes through it.
        gradients = sum(part.gradients for part in found)
        working = peak(found, accumulates=self.accumulates).total - gradients
        return [Part(kept=self.stream, working=working, gradients=gradients)]

    def attention(self) -> Part:
        model = self.model
        hidden = self.stream + self.whole
        # Low-rank queries and keys, before and after their norms.
        low = self.tokens * (2 * model.q_rank + 2 * model.kv_rank + model.rope) * self.size
        if not model.index_heads:
            kept, working = self.dense_core()
        else:
            kept, working = self.fused_core() if self.settings.fused else self.small_core()
        gradients = self.gradients(model.attention())
        return Part(kept=hidden + low + kept, working=hidden + working, gradients=gradients)

    @property
    def rows(self) -> float:
        return self.tokens * self.model.heads / self.layout.tp

    def dense_core(self) -> tuple[float, float]:
        """Kept between the projections, and what backward needs besides: queries, keys, values and the result."""
        model = self.model
        if model.latent:
            channels = self.rows * (2 * (model.nope + model.rope) + 2 * model.value)
        else:
            channels = self.tokens * 2 * (model.heads + model.kv_heads) / self.layout.tp * model.head_dim
        return channels * self.size + self.rows * WIDE, channels * self.size

    def small_core(self) -> tuple[float, float]:
        model, size, rows = self.model, self.size, self.rows
        query, keys = model.nope + model.rope, self.settings.seq
        pairs, index_pairs = rows * keys, self.tokens * keys * model.index_heads * WIDE
        heads = rows * (3 * query + 2 * model.value) * size  # queries twice, keys, values, the result
        index_q = self.tokens * model.index_heads * model.index_dim * size
        # The softmax, wide and as it is multiplied; in backward its gradient before and after, and that of the second.
        kept = pairs * (WIDE + size) + index_pairs + 3 * index_q + heads
        return kept, max(pairs * (2 * WIDE + size), 2 * index_pairs)

    def fused_core(self) -> tuple[float, float]:
        model, size, rows = self.model, self.size, self.rows
        query, keys = model.nope + model.rope, self.settings.seq
        index_q = self.tokens * model.index_heads * model.index_dim * size
        chosen = self.tokens * min(model.index_topk, keys)
        result = rows * model.value * size
        kept = index_q + chosen * INDEX + rows * WIDE + result
        learned = 2 * chosen * WIDE + index_q  # the target, its gradient, that of the indexer's queries
        if self.settings.masked and masks(keys, model.index_topk):
            kept += rows * query * size + self.tokens * keys / 8
            return kept, learned + rows * (3 * query + 3 * model.value) * size
        key, latent = rows * (model.kv_rank + model.rope) * size, rows * model.kv_rank * size
        # Turned channels are new, the others lie in the projection's result. What the output projection has kept is
        # free when the gradient of it, as large, comes back; absorbed queries are made again.
        kept += rows * (query + model.rope) * size + latent
        return kept, learned + latent + 2 * key + rows * model.nope * size

    def feed_forward(self, index: int) -> Part:
        """Gate before and after its activation, the other projection, their product, which is free when the others'
        gradients come."""
        model, layout = self.model, self.layout
        gradients = self.gradients(model.feed_forward(index))
        hidden = self.stream + self.whole
        if not model.has_experts(index):
            width = self.tokens * model.ffn / layout.tp * self.size
            return Part(kept=hidden + 4 * width, working=hidden + 2 * width, gradients=gradients)
        # A rank's own tokens go to whole experts, from all ranks; to experts cut by TP go all of the group.
        own, cut = (self.tokens, layout.tp) if layout.ep == 1 else (self.tokens / layout.tp, 1)
        own *= model.chosen
        come = own * fullest(model, layout, self.settings)
        shared = self.tokens * model.shared_experts / layout.tp
        width = (come / cut + shared) * model.expert_ffn * self.size
        into, out = come * model.hidden * self.size, own * model.hidden * self.size
        # What the experts gave is free once its gradient is there, which then goes to the ranks of the experts: two of
        # that. When hidden gradients come, one is left.
        working = max(into, 2 * width - out)
        return Part(kept=hidden + 4 * width + into + out, working=hidden + working, gradients=gradients)


def masks(keys: int, topk: int) -> bool:
    """`whorl.ops.choose_attention` where a kernel masks, without torch."""
    return keys <= max(topk, CROSSOVER * topk // 2048)
