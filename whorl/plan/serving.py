"""Count the bytes that serving a model takes on one rank: its share of the weights, and the KV cache of a token."""

from whorl.plan.model_shape import ModelShape

ENDS = 2  # bytes of an element of the embedding and the head, which quantised checkpoints leave in 16 bits


def weight_bytes(model: ModelShape, tp: int, element_bytes: float = 2) -> float:
    """Return the bytes of the weights on a rank of tensor parallelism; element_bytes: of a weight of a layer."""
    ends = model.embedding * (1 if model.tied else 2) / tp + model.hidden
    layers = 0.0
    for index, count in model.kinds(range(model.layers)).items():
        weights = model.layer(index)
        layers += count * ((weights.split + weights.experts) / tp + weights.replicated)
    return layers * element_bytes + ends * max(ENDS, element_bytes)


def cache_bytes(model: ModelShape, tp: int, element_bytes: float = 2) -> float:
    """Return the bytes that a token takes in the KV cache of a rank, over all layers.

    Every rank stores whole latents (multi-head latent attention) and whole keys of an indexer; key and value heads are
    split over the ranks, and each rank stores at least one of them.
    """
    if model.latent:
        return model.layers * (model.kv_rank + model.rope + model.index_dim) * element_bytes
    return 2 * model.layers * max(model.kv_heads / tp, 1) * model.head_dim * element_bytes
