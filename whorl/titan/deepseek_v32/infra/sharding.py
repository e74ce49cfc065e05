"""Divide the model into FSDP2 units: modules whose parameters are gathered by one all-gather."""

from typing import Any

from torch.distributed.fsdp import FSDPModule

from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.sharding import Sharding, fsdp_units, prefetch, shard_block


def transformer_blocks(model: DeepSeekV32Model) -> list[Any]:
    """Return the blocks of the layers, then those of multi-token prediction; they may be wrapped by checkpointing."""
    mtp_layers: list[Any] = [*model.mtp.values()]
    return [*model.layers.values(), *(layer.block for layer in mtp_layers)]


def shard(model: DeepSeekV32Model, sharding: Sharding) -> None:
    """Make units of the embedding, each block, the experts of each block under expert parallelism, and the head.

    Gradients are summed and not averaged, because the losses are already divided by the number of tokens.
    """
    from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division

    if model.tok_embeddings is not None:
        sharding.shard(model.tok_embeddings, reshard_after_forward=sharding.reshard)
    mtp_layers: list[Any] = [*model.mtp.values()]
    for layer in mtp_layers:
        sharding.shard(layer.norm)  # the model calls this norm outside the block
    for block in (*model.layers.values(), *mtp_layers):
        shard_block(block, sharding)
    head = [m for m in (model.norm, model.output) if m is not None]
    if head:
        sharding.shard(head, reshard_after_forward=sharding.reshard_last)
    sharding.shard(model)
    if isinstance(model.tok_embeddings, FSDPModule):
        # The backward of an embedding needs the tokens, not the weights.
        model.tok_embeddings.set_unshard_in_backward(False)
    disable_fsdp_gradient_division(model)
    prefetch(units_in_order(model), model.tok_embeddings)


def units_in_order(model: DeepSeekV32Model) -> list[list[FSDPModule]]:
    """Return, for each part of the model in the order of forward, its FSDP2 units; parts without units are left out."""
    head = model.output if model.norm is None else model.norm  # norm and head are one unit
    in_order = (model.tok_embeddings, *model.layers.values(), head, *model.mtp.values())
    return [unit for unit in map(fsdp_units, in_order) if unit]
