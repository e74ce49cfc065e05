"""Tensor-parallel styles that models share: gathered tokens, sharded heads, sharded and unsharded experts.

Where a replicated tensor is used by sharded heads, each rank computes only a part of its gradient. `to_heads` marks
that gradient as partial.
"""

from typing import Any

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.distributed import NoParallel


def to_heads(x: Any) -> Any:
    """Return the local tensor for the heads of this rank; the gradient of a replicated tensor is partial."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial() if p == Replicate() else p for p in x.placements])


def to_local(x: Any) -> Any:
    """Return the local tensor, where every rank computes the same gradient."""
    return x.to_local() if isinstance(x, DTensor) else x


class GatherTokens(ParallelStyle):
    """All-gathers the tokens of the first argument before the module is called."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0] if isinstance(args[0], DTensor) else DTensor.from_local(args[0], device_mesh, [Shard(1)])
            return x.redistribute(placements=[Replicate()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class RouterScores(NoParallel):
    """Replicates a router gate whose scores go to sharded experts, so that their gradient is partial."""

    def __init__(self) -> None:
        super().__init__(use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, args, output: to_heads(output))
        return module


class LocalHeads(ParallelStyle):
    """Calls the module with local tensors: the heads of this rank, and in full what all heads share."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_heads, args)))
        return module


class LocalReplicated(ParallelStyle):
    """Calls the module with local tensors, where every rank computes the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_local, args)))
        return module


def parallelize_sharded_experts(block: Any, mesh: DeviceMesh) -> None:
    """Parallelize the MoE of a block whose experts are sharded by channel: gather tokens, reduce-scatter the result.

    The output of an expert is then a partial sum, and so is the gradient of its score. TorchTitan's plan treats that
    gradient as complete where scores multiply the outputs of the experts, as they do here.
    """
    plan: dict[str, ParallelStyle] = {
        "moe": PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Partial(),),
            desired_output_layouts=(Shard(1),),
        ),
        "moe.router.gate": RouterScores(),
    }
    if block.moe.shared_experts is not None:
        plan.update({f"moe.shared_experts.{name}": ColwiseParallel() for name in ("w1", "w3")})
        plan["moe.shared_experts.w2"] = RowwiseParallel(output_layouts=Partial())
    parallelize_module(block, mesh, plan)


def parallelize_unsharded_experts(block: Any, mesh: DeviceMesh) -> None:
    """Parallelize the MoE of a block whose experts are unsharded and spread over ranks (expert parallelism, no ETP).

    Every rank routes its own tokens. Only the shared expert, which is sharded, gathers and scatters them. TorchTitan's
    plan gathers all tokens, routes every token on every rank and then drops the tokens of other ranks.
    """
    plan: dict[str, ParallelStyle] = {
        "moe": LocalReplicated(),
        # Tokens are sharded on dimension 0; the gradient of the weight is partial, as that of a norm.
        "moe.router.gate": SequenceParallel(sequence_dim=0, use_local_output=True),
    }
    if block.moe.shared_experts is not None:
        plan["moe.shared_experts"] = PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=False
        )
        for name in ("w1", "w3"):
            plan[f"moe.shared_experts.{name}"] = ColwiseParallel()
        plan["moe.shared_experts.w2"] = RowwiseParallel(output_layouts=Shard(0))
    parallelize_module(block, mesh, plan)
    group = mesh.get_group()

    def count_all(_: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        # TorchTitan updates the expert biases with counts that it sums over data-parallel ranks only.
        weights, chosen, counts = output
        return weights, chosen, collectives.all_reduce(counts, "sum", group)

    block.moe.router.register_forward_hook(count_all)
