"""Estimate the peak memory of a rank during a step: weights and moments, and the rest by a walk through backward.

Backward goes from the head to the embedding. When a part is done, what it saved for backward is freed, and its
gradients stay. `docs/training.md` compares these estimates with measurements.
"""

from dataclasses import dataclass, replace

from whorl.plan.layout import (
    Parallelism,
    PlanSettings,
    embedding_weights,
    gathered_parameters,
    head_weights,
    peak_expert_load,
    sharded_parameters,
    stage_weights,
    stages,
)
from whorl.plan.model_shape import ModelShape, Weights

GB = 1e9
BUCKET = 2 * (1 << 25)  # elements of a buffer of the swap optimizer on the device, which has two moments
FP32, INT32 = 4, 4  # bytes of an element
CROSSOVER = 6800  # `choose_attention` takes masked attention up to this many keys, where 2048 keys are selected


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The memory of the rank that needs most, at the peak of a step, in GB."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # gathered weights, unreduced gradients, the device buffers of a swapped optimizer
    reserve: float  # outside the allocator

    @property
    def allocated(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> float:
        return self.allocated + self.reserve


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The bytes of one part of a stage: attention, feed-forward layer, both as one layer, head, or embedding."""

    saved: float  # activations stored in forward for backward
    working: float  # temporary memory of backward
    gradients: float  # of this part's weights
    buffers: float = 0.0  # gathered weights and unreduced gradients of FSDP


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The bytes in use at one moment of backward, without weights and moments."""

    activations: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.buffers


def peak(parts: list[Part], *, accumulates: bool = False) -> Peak:
    """Return what is in use at the moment of backward that needs most memory. parts: in the order of forward.

    accumulates: the gradients of all parts are stored from the start, because an earlier micro-batch has left them.
    """
    saved, highest = sum(part.saved for part in parts), Peak()
    gradients = sum(part.gradients for part in parts) if accumulates else 0.0
    for part in reversed(parts):
        gradients += 0 if accumulates else part.gradients
        now = Peak(activations=saved + part.working, gradients=gradients, buffers=part.buffers)
        highest = max(highest, now, key=lambda p: p.total)
        saved -= part.saved
    return highest


def memory_of(model: ModelShape, layout: Parallelism, settings: PlanSettings) -> Memory:
    """Return the peak memory of a rank in the pipeline stage that needs most."""
    return max((stage_memory(model, layout, settings, s) for s in range(layout.pp)), key=lambda m: m.total)


def stage_memory(model: ModelShape, layout: Parallelism, settings: PlanSettings, stage: int) -> Memory:
    """Return the peak memory of a rank in one pipeline stage."""
    layers = stages(model, layout.pp)[stage]
    weights = sharded_parameters(stage_weights(model, layers), layout)
    parts = _PartSizes(model, layout, settings).stage_parts(layers)
    microbatches = settings.batch // layout.dp
    in_flight = min(layout.pp - stage, microbatches) - 1  # micro-batches besides the one in backward
    top = peak(parts, accumulates=microbatches > 1)
    # Without FSDP, autocast keeps a copy of all weights in the compute dtype; with FSDP only gathered units have one.
    copies = weights * settings.compute if layout.shards == 1 and settings.compute != settings.weight else 0
    ring = min(settings.ring * BUCKET, 2 * weights) * settings.moment if layout.swap else 0
    return Memory(
        parameters=weights * settings.weight / GB,
        gradients=top.gradients / GB,
        optimizer=0.0 if layout.swap else 2 * weights * settings.moment / GB,
        activations=(top.activations + in_flight * sum(part.saved for part in parts)) / GB,
        buffers=(top.buffers + copies + ring) / GB,
        reserve=settings.reserve,
    )


class _PartSizes:
    """Computes the sizes of the parts of a stage, for micro-batches of one sequence."""

    def __init__(self, model: ModelShape, layout: Parallelism, settings: PlanSettings) -> None:
        self.model, self.layout, self.settings = model, layout, settings
        self.size, self.accumulates = settings.compute, settings.batch // layout.dp > 1
        self.tokens = settings.seq / layout.cp
        # TP shards the residual stream over tokens; a projection takes the gathered tokens.
        self.gathered_hidden = self.tokens * model.hidden * self.size
        self.residual = self.gathered_hidden / layout.tp

    def stage_parts(self, layers: range) -> list[Part]:
        """Return the parts of a stage in the order of forward, with the buffers of FSDP.

        A unit of FSDP is a layer, the head or the embedding. Its buffers hold its own gathered weights and those of the
        unit that is prefetched meanwhile.
        """
        kinds = {self.model.has_experts(i): (self.layer(i), self.model.layer(i)) for i in self.model.kinds(layers)}
        unit_parts = [kinds[self.model.has_experts(i)][0] for i in layers]
        weights = [kinds[self.model.has_experts(i)][1] for i in layers]
        if layers.stop == self.model.layers:
            unit_parts.append([self.head(head_weights(self.model, layers))])
            weights.append(Weights(split=self.model.embedding))
        # Backward prefetches the unit before. The first layer prefetches nothing: backward needs no embedding weights.
        prefetched = [Weights(), *weights]
        parts = [
            replace(part, buffers=self.buffers(unit_weights, next_weights))
            for unit, unit_weights, next_weights in zip(unit_parts, weights, prefetched, strict=False)
            for part in unit
        ]
        table = embedding_weights(self.model, layers)
        if not table.total:
            return parts
        gradients = self.gradients(table)
        return [Part(saved=0, working=self.residual, gradients=gradients, buffers=self.unreduced(table)), *parts]

    def gradients(self, weights: Weights) -> float:
        return sharded_parameters(weights, self.layout) * self.settings.gradient

    def unreduced(self, weights: Weights) -> float:
        """Return the bytes of a unit's unsharded gradients: as computed, and in the dtype that they are reduced in."""
        if self.layout.shards == 1:
            return 0.0
        return gathered_parameters(weights, self.layout) * (self.size + self.settings.gradient)

    def buffers(self, unit_weights: Weights, next_weights: Weights) -> float:
        """Return the bytes that FSDP needs while a unit is in backward and the next one is gathered."""
        if self.layout.shards == 1:
            return 0.0
        return gathered_parameters(unit_weights + next_weights, self.layout) * self.size + self.unreduced(unit_weights)

    def head(self, weights: Weights) -> Part:
        """Return the sizes of the last norm, the head and the loss. weights: those that the head adds to the stage."""
        vocab = self.model.vocab / self.layout.tp
        logits = self.tokens * vocab * self.size  # the gradient overwrites the logits
        chunk = min(self.settings.chunk or self.tokens, self.tokens) * vocab * FP32 * 2
        hidden = self.residual + self.gathered_hidden  # input and output of the norm; the gradients are as large
        return Part(saved=hidden + logits, working=hidden + chunk, gradients=self.gradients(weights))

    def layer(self, index: int) -> list[Part]:
        """Return the sizes of a layer: of its two parts or, with activation checkpointing, of the layer as one part."""
        parts = [self.attention(), self.feed_forward(index)]
        if not self.settings.checkpoint:
            return parts
        # Only the input of the layer is saved: backward recomputes the layer and then walks through its parts.
        gradients = sum(part.gradients for part in parts)
        working = peak(parts, accumulates=self.accumulates).total - gradients
        return [Part(saved=self.residual, working=working, gradients=gradients)]

    def attention(self) -> Part:
        """Return the sizes of an attention with its norm, projections and indexer."""
        model = self.model
        hidden = self.residual + self.gathered_hidden
        # Low-rank queries and keys, before and after their norms.
        low = self.tokens * (2 * model.q_rank + 2 * model.kv_rank + model.rope) * self.size
        if not model.index_heads:
            saved, working = self.dense_core()
        else:
            saved, working = self.fused_core() if self.settings.fused else self.small_core()
        gradients = self.gradients(model.attention())
        return Part(saved=hidden + low + saved, working=hidden + working, gradients=gradients)

    @property
    def token_heads(self) -> float:
        """Return the number of (token, head) pairs of a rank."""
        return self.tokens * self.model.heads / self.layout.tp

    def dense_core(self) -> tuple[float, float]:
        """Return the saved and the working bytes of dense attention between its projections.

        Saved are queries, keys, values, the result and its log-sum-exp; backward needs their gradients.
        """
        model = self.model
        if model.latent:
            channels = self.token_heads * (2 * (model.nope + model.rope) + 2 * model.value)
        else:
            channels = self.tokens * 2 * (model.heads + model.kv_heads) / self.layout.tp * model.head_dim
        return channels * self.size + self.token_heads * FP32, channels * self.size

    def small_core(self) -> tuple[float, float]:
        """Return the saved and the working bytes of sparse attention in small operators, which store all scores."""
        model, size, token_heads = self.model, self.size, self.token_heads
        query, keys = model.nope + model.rope, self.settings.seq
        pairs, index_pairs = token_heads * keys, self.tokens * keys * model.index_heads * FP32
        heads = token_heads * (3 * query + 2 * model.value) * size  # queries twice, keys, values and the result
        index_q = self.tokens * model.index_heads * model.index_dim * size
        # Saved: the softmax in fp32 and in the compute dtype. Backward: the gradients of its input, its output and the
        # copy in the compute dtype.
        saved = pairs * (FP32 + size) + index_pairs + 3 * index_q + heads
        return saved, max(pairs * (2 * FP32 + size), 2 * index_pairs)

    def fused_core(self) -> tuple[float, float]:
        """Return the saved and the working bytes of fused sparse attention, masked or absorbed."""
        model, size, token_heads = self.model, self.size, self.token_heads
        query, keys = model.nope + model.rope, self.settings.seq
        index_q = self.tokens * model.index_heads * model.index_dim * size
        chosen = self.tokens * min(model.index_topk, keys)
        result = token_heads * model.value * size
        saved = index_q + chosen * INT32 + token_heads * FP32 + result
        learned = 2 * chosen * FP32 + index_q  # the target, its gradient and the gradient of the indexer's queries
        if self.settings.masked and uses_masked_attention(keys, model.index_topk):
            saved += token_heads * query * size + self.tokens * keys / 8
            return saved, learned + token_heads * (3 * query + 3 * model.value) * size
        key, latent = token_heads * (model.kv_rank + model.rope) * size, token_heads * model.kv_rank * size
        # Absorbed. Saved are the queries as the projection returned them, their rotated channels as a new tensor, and
        # the latent output of each head. The input of the output projection, `result`, is freed when its gradient,
        # which is as large, arrives. Working: the gradient of the latent output, the absorbed queries, which are
        # recomputed, their gradient, and the gradient of the query channels that are not rotated.
        saved += token_heads * (query + model.rope) * size + latent
        return saved, learned + latent + 2 * key + token_heads * model.nope * size

    def feed_forward(self, index: int) -> Part:
        """Return the sizes of a feed-forward layer.

        Saved are the gate before and after its activation, the up projection and their product, which is freed before
        the gradients of the other three are stored.
        """
        model, layout = self.model, self.layout
        gradients = self.gradients(model.feed_forward(index))
        hidden = self.residual + self.gathered_hidden
        if not model.has_experts(index):
            width = self.tokens * model.ffn / layout.tp * self.size
            return Part(saved=hidden + 4 * width, working=hidden + 2 * width, gradients=gradients)
        # With EP a rank sends its own tokens to unsharded experts. Experts sharded by TP take all tokens of the group.
        sent, expert_shards = (self.tokens, layout.tp) if layout.ep == 1 else (self.tokens / layout.tp, 1)
        sent *= model.chosen
        received = sent * peak_expert_load(model, layout, self.settings)
        shared = self.tokens * model.shared_experts / layout.tp
        width = (received / expert_shards + shared) * model.expert_ffn * self.size
        input_bytes, output_bytes = received * model.hidden * self.size, sent * model.hidden * self.size
        # The output of the experts is freed once its gradient exists. That gradient goes to the ranks of the experts:
        # there are two copies of it; one is left when the gradients of the hidden activations are computed.
        working = max(input_bytes, 2 * width - output_bytes)
        return Part(
            saved=hidden + 4 * width + input_bytes + output_bytes, working=hidden + working, gradients=gradients
        )


def uses_masked_attention(keys: int, topk: int) -> bool:
    """Return whether `whorl.ops.choose_attention` takes masked attention on a device that has its kernel."""
    return keys <= max(topk, CROSSOVER * topk // 2048)
