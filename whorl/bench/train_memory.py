"""Memory of one rank that trains a whole model: the planner's counts of parameters, and what each layer keeps.

The planner itself is about ranks that share a model with activation checkpointing and fp32 states. Here a layer keeps
all that its backward reads, and weights, gradients and moments have one size.
"""

from dataclasses import dataclass

from whorl.ops import choose_attention
from whorl.titan.deepseek_v32.args import DeepSeekV32Args
from whorl.titan.deepseek_v32.hf import to_hf_config
from whorl.titan.model_shape import ModelShape, from_hugging_face

RING = 3 * 2 * (1 << 25)  # elements: the swap optimizer's chunks on the device, of two moments
WIDE, INDEX = 4, 4  # bytes: fp32, int32
CHUNK = 512  # tokens of the cross entropy at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Bytes of an attention, a feed-forward layer, the head or the embedding, in the order of forward."""

    kept: float  # from forward to backward
    working: float  # of backward alone
    gradients: float


def predict(args: DeepSeekV32Args, seq: int, switches: frozenset[str], size: int) -> float:
    """Bytes at the peak of a step of one sequence; `size`: of a weight, a gradient and a moment each."""
    shape = from_hugging_face(to_hf_config(args), "trained here")
    states = shape.parameters * size * (1 if "swap" in switches else 3)
    return states + (RING * size if "swap" in switches else 0) + peak(parts(shape, seq, switches, size))


def peak(all_parts: list[Part]) -> float:
    """Backward goes from the last part to the first: what it has read is free, gradients stay."""
    kept, gradients, most = sum(part.kept for part in all_parts), 0.0, 0.0
    for part in reversed(all_parts):
        gradients += part.gradients
        most = max(most, kept + part.working + gradients)
        kept -= part.kept
    return most


def parts(shape: ModelShape, seq: int, switches: frozenset[str], size: int) -> list[Part]:
    stream = seq * shape.hidden * size
    found = [Part(kept=0, working=stream, gradients=shape.embedding * size)]
    for i in range(shape.layers):
        layer = [attention(shape, seq, "dsa" in switches, size), feed_forward(shape, i, seq, size)]
        found += [_again(layer, stream)] if "checkpoint" in switches else layer
    logits = seq * shape.vocab * size  # their gradient takes their place
    chunk = min(CHUNK, seq) * shape.vocab * WIDE * 2
    return [*found, Part(kept=2 * stream + logits, working=2 * stream + chunk, gradients=shape.embedding * size)]


def _again(layer: list[Part], stream: float) -> Part:
    """A layer of which only the input is kept: backward has all of it, and goes through it."""
    gradients = sum(part.gradients for part in layer)
    return Part(kept=stream, working=peak(layer) - gradients, gradients=gradients)


def attention(shape: ModelShape, seq: int, is_fused: bool, size: int) -> Part:
    # The norm's input and output; low-rank queries and keys, before and after their norms.
    stream = 2 * shape.hidden + 2 * shape.q_rank + 2 * shape.kv_rank + shape.rope
    kept, working = _core(shape, seq, is_fused, size)
    flowing = 2 * seq * shape.hidden * size  # the gradients of the residual and of what is added to it
    return Part(kept=seq * stream * size + kept, working=flowing + working, gradients=shape.attention().total * size)


def _core(shape: ModelShape, seq: int, is_fused: bool, size: int) -> tuple[float, float]:
    """What is kept between the projections, and what backward needs besides."""
    rows, query = seq * shape.heads, shape.nope + shape.rope
    index_q = seq * shape.index_heads * shape.index_dim * size
    result = rows * shape.value * size
    if not is_fused:
        pairs, index_pairs = rows * seq, seq * seq * shape.index_heads * WIDE
        heads = rows * (3 * query + shape.value) * size  # queries twice, keys, values
        # The softmax, wide and as it is multiplied; in backward its gradient before and after, and that of the second.
        softmax = pairs * (WIDE + size)
        return softmax + index_pairs + 3 * index_q + heads + result, max(pairs * (2 * WIDE + size), 2 * index_pairs)
    chosen = min(shape.index_topk, seq)
    kept = float(index_q + seq * chosen * INDEX + rows * WIDE)
    learned = 2 * seq * chosen * WIDE + index_q  # the target, its gradient, that of the indexer's queries
    if choose_attention(seq, shape.index_topk) == "masked":
        heads = rows * (query + shape.value) * size
        kept += rows * query * size + result + seq * seq / 8
        return kept, learned + 2 * heads + rows * query * size + result
    key, latent = (shape.kv_rank + shape.rope) * rows * size, shape.kv_rank * rows * size
    # Turned channels are new, the others lie in the projection's result. What the output projection has kept is free
    # when the gradient of it, as large, comes back; absorbed queries are made again.
    kept += rows * (query + shape.rope) * size + latent + result
    return kept, learned + latent + 2 * key + rows * shape.nope * size


def feed_forward(shape: ModelShape, index: int, seq: int, size: int) -> Part:
    """Gate before and after its activation, the other projection, their product; in backward their gradients."""
    stream = 2 * seq * shape.hidden * size  # the norm's input and output; as much flows back
    gradients = (shape.layer(index).total - shape.attention().total) * size
    if not shape.has_experts(index):
        hidden = seq * shape.ffn * size
        return Part(kept=stream + 4 * hidden, working=stream + 3 * hidden, gradients=gradients)
    rows = seq * shape.chosen
    hidden = (rows + seq * shape.shared_experts) * shape.expert_ffn * size
    moved = 2 * rows * shape.hidden * size  # into the experts, and out of them
    return Part(kept=stream + 4 * hidden + moved, working=stream + 3 * hidden + moved, gradients=gradients)
