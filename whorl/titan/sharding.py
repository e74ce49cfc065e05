"""Apply FSDP2: its options in a job, the sharding of a block with its experts, and prefetching."""

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

# Values of parallelism.fsdp_reshard_after_forward; None: reshard unless there are pipeline stages.
RESHARD = {"always": True, "never": False, "default": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How FSDP2 shards the modules of a model."""

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None  # the mesh that shards the experts under expert parallelism, else None
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    offload: bool  # keep parameters, gradients and optimizer state on the host
    reshard: bool  # free the gathered parameters of a block after its forward
    reshard_last: bool  # also free those of the head, which backward needs first

    @staticmethod
    def from_config(job_config: JobConfig, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> "Sharding":
        """Return the sharding that a job config describes; raises ValueError for an unknown reshard policy."""
        training, policy = job_config.training, job_config.parallelism.fsdp_reshard_after_forward
        if policy not in RESHARD:
            raise ValueError(
                f"parallelism.fsdp_reshard_after_forward is {policy!r}, expected one of {', '.join(RESHARD)}"
            )
        # A pipeline runs a stage many times in a step; compute would not hide gathering its parameters each time.
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

    def shard(self, modules: Any, mesh: DeviceMesh | None = None, **options: Any) -> None:
        """Make one FSDP2 unit of a module or a list of modules. mesh: None for `self.mesh`; options: of fully_shard."""
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,  # activations already have the dtype, and the rotary table must stay fp32
        )
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        fully_shard(modules, mesh=mesh or self.mesh, **options)


def shard_block(block: nn.Module, sharding: Sharding) -> None:
    """Shard a block, with its experts as a separate unit under expert parallelism."""
    mesh = sharding.expert_mesh
    for moe in (m for m in block.modules() if isinstance(m, MoE) and mesh is not None):
        # Expert parallelism has sharded dimension 0, the experts. FSDP2 shards it again by default; if a rank has fewer
        # experts than FSDP2 has ranks, FSDP2 shards dimension 1 instead.
        local = moe.experts.w1.to_local().shape[0]
        placement = None if mesh is None or mesh.size(-1) <= local else (lambda _: Shard(1))
        sharding.shard(moe.experts, mesh, reshard_after_forward=sharding.reshard, shard_placement_fn=placement)
    sharding.shard(block, reshard_after_forward=sharding.reshard)


def fsdp_units(module: nn.Module | None) -> list[FSDPModule]:
    """Return the FSDP2 units of a module: itself, then those inside it, such as the experts of a block."""
    return [] if module is None else [m for m in module.modules() if isinstance(m, FSDPModule)]


def prefetch(in_order: Sequence[list[FSDPModule]], not_in_backward: nn.Module | None) -> None:
    """Make FSDP2 gather the parameters of the next module when a module starts, in forward and in backward.

    in_order: for each module, in the order of forward, its FSDP2 units as `fsdp_units` returns them. not_in_backward: a
    module whose parameters backward does not gather. By default FSDP2 prefetches only in backward, in the order that it
    recorded in forward, and in a block with expert parallelism it starts only after the CPU has waited for the sizes of
    the dispatch.
    """
    for unit, following in pairwise(in_order):
        unit[0].set_modules_to_forward_prefetch(following)
    for unit, previous in pairwise(reversed(in_order)):
        if previous[0] is not not_in_backward:
            unit[0].set_modules_to_backward_prefetch(previous)
