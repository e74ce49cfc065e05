"""Tensor-parallel styles that models share: gathered tokens, sharded heads, sharded and unsharded experts.

A DTensor becomes a local tensor in one of two ways, which differ only in backward. Where a replicated tensor is used by
the heads of one rank, that rank computes only a part of its gradient: `to_heads` declares the gradient partial, and
DTensor sums it over the ranks. Where the local gradient is already complete, because every rank computes the same, or
because the tensor is sharded, `local` leaves it as it is.
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

from whorl.titan.local import local


def to_heads(x: Any) -> Any:
    """Return the local tensor of a DTensor for use by this rank's heads: a replicated tensor gets a partial gradient.

    Anything but a DTensor is returned unchanged.
    """
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial() if p == Replicate() else p for p in x.placements])


class GatherTokens(ParallelStyle):
    """All-gathers the first argument before the module is called: [B, S / P, ...] of each rank to [B, S, ...]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0] if isinstance(args[0], DTensor) else DTensor.from_local(args[0], device_mesh, [Shard(1)])
            return x.redistribute(placements=[Replicate()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class RouterScores(NoParallel):
    """Replicates the gate of a router whose scores go to sharded experts: the gradient of the scores is partial."""

    def __init__(self) -> None:
        super().__init__(use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, args, output: to_heads(output))
        return module


class LocalHeads(ParallelStyle):
    """Calls the module with local tensors by `to_heads`: the heads of this rank, and in full what all heads share."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_heads, args)))
        return module


class LocalReplicated(ParallelStyle):
    """Calls the module with local tensors by `local`, which leaves their gradients as they are."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(local, args)))
        return module


def parallelize_sharded_experts(block: Any, mesh: DeviceMesh) -> None:
    """Parallelize the MoE of a block whose experts are sharded by channel: gather tokens, reduce-scatter the result.

    The output of an expert is then a partial sum on each rank. Here scores multiply these outputs, so that the gradient
    of a score is a partial sum as well. TorchTitan's own plan would treat it as complete.
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
        "moe": LocalReplicated(),  # the tokens stay sharded: their local gradients are complete
        # The MoE flattens its tokens, so that they are sharded on dimension 0. Each rank has the gradient of the gate's
        # weight from its own tokens only; with SequenceParallel it is a partial DTensor, as that of a norm.
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
        # Sum over tensor-parallel ranks, because TorchTitan, which updates the expert biases with these counts, sums
        # them only over data-parallel ranks.
        weights, chosen, counts = output
        return weights, chosen, collectives.all_reduce(counts, "sum", group)

    block.moe.router.register_forward_hook(count_all)
