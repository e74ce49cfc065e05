"""FSDP2: what a job asks of it, a block with its experts, and who asks for whose parameters ahead of time."""

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


def shard_block(block: nn.Module, sharding: Sharding) -> None:
    mesh = sharding.expert_mesh
    for moe in (m for m in block.modules() if isinstance(m, MoE) and mesh is not None):
        # Dimension 0 is shared out by expert parallelism; where too few experts are left to share, cut them.
        local = moe.experts.w1.to_local().shape[0]
        cut = None if mesh is None or mesh.size(-1) <= local else (lambda _: Shard(1))
        sharding.shard(moe.experts, mesh, reshard_after_forward=sharding.reshard, shard_placement_fn=cut)
    sharding.shard(block, reshard_after_forward=sharding.reshard)


def inside(module: nn.Module | None) -> list[FSDPModule]:
    """Units of a module: itself, then those within, as a block's experts."""
    return [] if module is None else [m for m in module.modules() if isinstance(m, FSDPModule)]


def prefetch(in_order: Sequence[list[FSDPModule]], not_in_backward: nn.Module | None) -> None:
    """Each unit asks for the next as it starts, in both directions; `in_order` is that of the forward.

    FSDP2 by itself does so in backward only, and by what it saw in forward; waiting for the sizes of an expert-parallel
    dispatch would hold up even that.
    """
    for unit, following in pairwise(in_order):
        unit[0].set_modules_to_forward_prefetch(following)
    for unit, before in pairwise(reversed(in_order)):
        if before[0] is not not_in_backward:
            unit[0].set_modules_to_backward_prefetch(before)
