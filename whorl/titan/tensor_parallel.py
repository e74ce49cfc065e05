"""Tensor parallelism of what models have in common: tokens gathered and scattered, heads, experts cut or whole.

What is replicated and meets sharded heads gets a part of its gradient on every rank: `to_heads` says so.
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
    """This rank's part of a tensor, on the way to its heads: of what all ranks hold, the gradient is partial."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial() if p == Replicate() else p for p in x.placements])


def to_local(x: Any) -> Any:
    """The same where every rank computes the same gradient."""
    return x.to_local() if isinstance(x, DTensor) else x


class GatherTokens(ParallelStyle):
    """The first argument comes with some of the tokens and is handed on with all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0] if isinstance(args[0], DTensor) else DTensor.from_local(args[0], device_mesh, [Shard(1)])
            return x.redistribute(placements=[Replicate()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class Scores(NoParallel):
    """A replicated gate whose scores go to experts that are cut: their gradient is partial."""

    def __init__(self) -> None:
        super().__init__(use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, args, output: to_heads(output))
        return module


class Heads(ParallelStyle):
    """Runs on plain tensors, and gives them: this rank's heads and, whole, what all heads share."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_heads, args)))
        return module


class Alike(ParallelStyle):
    """Runs on plain tensors, and gives them: every rank computes the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_local, args)))
        return module


def share_out_cut_experts(block: Any, mesh: DeviceMesh) -> None:
    """For experts of which every rank has some channels: tokens are gathered, the result is scattered.

    What an expert gives is then a part of a sum, and so is the gradient of its score. TorchTitan's own plan takes that
    for the whole where scores multiply the experts' results, as they do here.
    """
    plan: dict[str, ParallelStyle] = {
        "moe": PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Partial(),),
            desired_output_layouts=(Shard(1),),
        ),
        "moe.router.gate": Scores(),
    }
    if block.moe.shared_experts is not None:
        plan.update({f"moe.shared_experts.{name}": ColwiseParallel() for name in ("w1", "w3")})
        plan["moe.shared_experts.w2"] = RowwiseParallel(output_layouts=Partial())
    parallelize_module(block, mesh, plan)


def share_out_whole_experts(block: Any, mesh: DeviceMesh) -> None:
    """For experts that are whole, spread over tensor-parallel ranks as over others (expert parallelism without ETP).

    Every rank routes its own tokens. Only the shared expert, which is cut, gathers and scatters them: TorchTitan's own
    plan gathers for all, routes every token on every rank and then drops what is not its own.
    """
    plan: dict[str, ParallelStyle] = {
        "moe": Alike(),
        # On tokens by their first dimension; the weight's gradient is partial, as that of a norm.
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
        # TorchTitan moves the experts' biases by counts that it adds over data-parallel ranks only.
        weights, chosen, counts = output
        return weights, chosen, collectives.all_reduce(counts, "sum", group)

    block.moe.router.register_forward_hook(count_all)
