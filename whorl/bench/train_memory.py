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
    """Bytes of a layer, of the head or of the embedding, in the order of forward."""

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
        kept, working = layer(shape, i, seq, switches, size)
        if "checkpoint" in switches:
            kept, working = stream, kept + working
        found.append(Part(kept=kept, working=working, gradients=shape.layer(i).total * size))
    logits = seq * shape.vocab * size  # their gradient takes their place
    chunk = min(CHUNK, seq) * shape.vocab * WIDE * 2
    return [*found, Part(kept=2 * stream + logits, working=2 * stream + chunk, gradients=shape.embedding * size)]


def layer(shape: ModelShape, index: int, seq: int, switches: frozenset[str], size: int) -> tuple[float, float]:
    """What is kept, and what backward needs besides."""
    attention, attention_working = _attention(shape, seq, "dsa" in switches, size)
    feed, feed_working = _feed_forward(shape, index, seq, size)
    # Both norms' inputs and outputs; low-rank queries and keys, before and after their norm.
    stream = 4 * shape.hidden + 2 * shape.q_rank + 2 * shape.kv_rank + shape.rope
    flowing = 3 * seq * shape.hidden * size  # gradients of the residual and of a normalised input
    return seq * stream * size + attention + feed, flowing + max(attention_working, feed_working)


def _attention(shape: ModelShape, seq: int, is_fused: bool, size: int) -> tuple[float, float]:
    rows, query = seq * shape.heads, shape.nope + shape.rope
    index_q = seq * shape.index_heads * shape.index_dim * size
    result = rows * shape.value * size
    if not is_fused:
        pairs = rows * seq
        heads = rows * (3 * query + shape.value) * size  # queries twice, keys, values
        index_pairs = seq * seq * shape.index_heads * WIDE
        # Softmax wide and as it is multiplied; in backward three more of the first and one of the second.
        kept = pairs * (WIDE + size) + index_pairs + 3 * index_q + heads + result
        return kept, pairs * (3 * WIDE + size) + index_pairs
    chosen = min(shape.index_topk, seq)
    kept = index_q + seq * chosen * INDEX + result + rows * WIDE
    target = 2 * seq * chosen * WIDE
    if choose_attention(seq, shape.index_topk) == "masked":
        heads = rows * (query + shape.value) * size
        return kept + rows * query * size + seq * seq / 8, target + 2 * heads + rows * query * size + result + index_q
    key = shape.kv_rank + shape.rope
    latent = rows * shape.kv_rank * size
    queries = rows * (query + shape.rope) * size  # turned channels are new, the others lie in the projection's result
    return kept + queries + latent, target + latent + rows * (2 * key + query) * size + result + index_q


def _feed_forward(shape: ModelShape, index: int, seq: int, size: int) -> tuple[float, float]:
    """Gate before and after its activation, the other projection, their product; in backward their gradients."""
    if not shape.has_experts(index):
        hidden = seq * shape.ffn * size
        return 4 * hidden, 3 * hidden
    rows = seq * shape.chosen
    hidden = (rows + seq * shape.shared_experts) * shape.expert_ffn * size
    moved = 2 * rows * shape.hidden * size  # into the experts, and out of them
    return 4 * hidden + moved, 3 * hidden + moved
