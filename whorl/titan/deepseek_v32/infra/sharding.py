"""FSDP2: which modules of the model share an all-gather."""

from typing import Any

from torch.distributed.fsdp import FSDPModule

from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.sharding import Sharding, fsdp_units, prefetch, shard_block


def blocks_of(model: DeepSeekV32Model) -> list[Any]:
    """The layers, then those of multi-token prediction: `TransformerBlock`s, or what activation checkpointing made."""
    further: list[Any] = [*model.mtp.values()]
    return [*model.layers.values(), *(f.block for f in further)]


def shard(model: DeepSeekV32Model, sharding: Sharding) -> None:
    """One unit for the embedding, one for each block and one for each block's whole experts, one for the head.

    Gradients are summed: the losses are divided by the number of tokens before.
    """
    from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division

    if model.tok_embeddings is not None:
        sharding.shard(model.tok_embeddings, reshard_after_forward=sharding.reshard)
    further: list[Any] = [*model.mtp.values()]
    for layer in further:
        sharding.shard(layer.norm)  # the model calls it by itself
    for block in (*model.layers.values(), *further):
        shard_block(block, sharding)
    head = [m for m in (model.norm, model.output) if m is not None]
    if head:
        sharding.shard(head, reshard_after_forward=sharding.reshard_last)
    sharding.shard(model)
    if isinstance(model.tok_embeddings, FSDPModule):
        model.tok_embeddings.set_unshard_in_backward(False)  # which needs the tokens, not the table
    disable_fsdp_gradient_division(model)
    prefetch(units(model), model.tok_embeddings)


def units(model: DeepSeekV32Model) -> list[list[FSDPModule]]:
    """What is gathered together, in the order of the forward."""
    head = model.output if model.norm is None else model.norm  # either reaches the unit of both
    in_order = (model.tok_embeddings, *model.layers.values(), head, *model.mtp.values())
    return [unit for unit in map(fsdp_units, in_order) if unit]
