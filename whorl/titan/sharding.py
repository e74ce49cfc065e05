"""FSDP2: which modules share an all-gather, and who asks for whose parameters ahead of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.models.moe import MoE

from .deepseek_v32.model import DeepSeekV32Model

RESHARD = {"always": True, "never": False, "default": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None  # of whole experts, with expert parallelism
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    offload: bool
    reshard: bool  # free a block's parameters after its forward
    reshard_last: bool  # those of the head, too, which backward wants at once

    @staticmethod
    def of(job_config: JobConfig, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> "Sharding":
        training, policy = job_config.training, job_config.parallelism.fsdp_reshard_after_forward
        if policy not in RESHARD:
            raise ValueError(
                f"parallelism.fsdp_reshard_after_forward is {policy!r}, expected one of {', '.join(RESHARD)}"
            )
        # A pipeline runs a stage many times in a step: gathering its parameters each time is not hidden.
        is_pipelined = job_config.parallelism.pipeline_parallel_degree > 1
        return Sharding(
            mesh=mesh,
            expert_mesh=expert_mesh,
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            offload=training.enable_cpu_offload,
            reshard=not is_pipelined if RESHARD[policy] is None else bool(RESHARD[policy]),
            reshard_last=policy == "always",
        )

    def shard(self, modules: Any, mesh: DeviceMesh | None = None, **more: Any) -> None:
        more["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,  # activations have the dtype already, and the rotary table keeps its own
        )
        if self.offload:
            more["offload_policy"] = CPUOffloadPolicy()
        fully_shard(modules, mesh=mesh or self.mesh, **more)


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
        _shard_block(block, sharding)
    head = [m for m in (model.norm, model.output) if m is not None]
    if head:
        sharding.shard(head, reshard_after_forward=sharding.reshard_last)
    sharding.shard(model)
    if isinstance(model.tok_embeddings, FSDPModule):
        model.tok_embeddings.set_unshard_in_backward(False)  # which needs the tokens, not the table
    disable_fsdp_gradient_division(model)
    prefetch(model)


def _shard_block(block: nn.Module, sharding: Sharding) -> None:
    mesh = sharding.expert_mesh
    for moe in (m for m in block.modules() if isinstance(m, MoE) and mesh is not None):
        # Dimension 0 is shared out by expert parallelism; where too few experts are left to share, cut them.
        local = moe.experts.w1.to_local().shape[0]
        cut = None if mesh is None or mesh.size(-1) <= local else (lambda _: Shard(1))
        sharding.shard(moe.experts, mesh, reshard_after_forward=sharding.reshard, shard_placement_fn=cut)
    sharding.shard(block, reshard_after_forward=sharding.reshard)


def units(model: DeepSeekV32Model) -> list[list[FSDPModule]]:
    """What is gathered together, in the order of the forward."""

    def inside(module: nn.Module | None) -> list[FSDPModule]:
        """A block, then its experts."""
        return [] if module is None else [m for m in module.modules() if isinstance(m, FSDPModule)]

    head = model.output if model.norm is None else model.norm  # either reaches the unit of both
    in_order = (model.tok_embeddings, *model.layers.values(), head, *model.mtp.values())
    return [unit for unit in map(inside, in_order) if unit]


def prefetch(model: DeepSeekV32Model) -> None:
    """Each unit asks for the next as it starts, in both directions.

    FSDP2 by itself does so in backward only, and by what it saw in forward; waiting for the sizes of an expert-parallel
    dispatch would hold up even that.
    """
    in_order: Sequence[list[FSDPModule]] = units(model)
    for unit, following in pairwise(in_order):
        unit[0].set_modules_to_forward_prefetch(following)
    for unit, before in pairwise(reversed(in_order)):
        if before[0] is not model.tok_embeddings:
            unit[0].set_modules_to_backward_prefetch(before)
