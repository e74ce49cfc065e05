"""Tensor parallelism: heads, hidden channels and experts are sharded; between these modules the tokens are sharded.

The low-rank projections and the indexer are replicated: they are small, and their inputs are already gathered. The
gradients that reach them through the heads of one rank are partial. That is handled in two places: `to_heads`, where
replicated tensors meet sharded heads, and `Core.reduce_target`, which sums over heads to get the indexer's target.
"""

from typing import Any

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.distributed import NoParallel

from whorl.titan.deepseek_v32.attention import Attention
from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.local import local
from whorl.titan.tensor_parallel import GatherTokens, LocalHeads, LocalReplicated, to_heads

# Modules of the attention, and of its indexer, that every rank computes in full.
REPLICATED = ("wq_a", "q_norm", "wkv_a", "kv_norm")
INDEXER = ("wq_b", "wk", "k_norm", "weights_proj")


def apply_tensor_parallel(model: DeepSeekV32Model, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Apply tensor parallelism to all of the model except its experts."""
    ends: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    parallelize_module(model, mesh, {name: s for name, s in ends.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        _parallelize_block(block, mesh)


def _parallelize_block(block: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": GatherTokens(),
        **{f"attention.{name}": NoParallel(use_local_output=False) for name in REPLICATED},
        **{f"attention.indexer.{name}": NoParallel(use_local_output=False) for name in INDEXER},
        "attention.wq_b": ColwiseParallel(use_local_output=False),
        "attention.wkv_b": ColwiseParallel(use_local_output=False),
        "attention.rotary": LocalHeads(),
        "attention.indexer.rotary": LocalReplicated(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
    }
    if not block.moe_enabled:
        plan["feed_forward"] = GatherTokens()
        for name in ("w1", "w3"):
            plan[f"feed_forward.{name}"] = ColwiseParallel()
        plan["feed_forward.w2"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(block, mesh, plan)
    _parallelize_core(block.attention, mesh)


def _parallelize_core(attention: Attention, mesh: DeviceMesh) -> None:
    """Give the core local tensors, and sum the targets of the indexer over the heads of all ranks."""

    def to_local_tensors(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        attention_inputs, index_inputs = args[:5], args[5:8]
        return *map(to_heads, attention_inputs), *map(local, index_inputs), *args[8:]

    attention.core.register_forward_pre_hook(to_local_tensors)
    group = mesh.get_group()

    def add_heads(target: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(target, "sum", group))

    attention.core.reduce_target = add_heads
