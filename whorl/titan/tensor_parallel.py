"""Tensor parallelism: heads, hidden channels and experts are shared out; between them tokens are.

The low-rank projections and the indexer are computed by every rank: they are small, and what they need is there. The
gradients that reach them through this rank's heads are a part of the sum. Two places say so: `to_heads`, where
replicated tensors meet sharded heads, and `Core.reduce_target`, where heads are added up to be the indexer's target.
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

from .deepseek_v32.attention import Attention
from .deepseek_v32.model import DeepSeekV32Model

REPLICATED = ("wq_a", "q_norm", "wkv_a", "kv_norm")
INDEXER = ("wq_b", "wk", "k_norm", "weights_proj")


def to_heads(x: Any) -> Any:
    """This rank's part of a tensor, on the way to its heads: of what all ranks hold, the gradient is partial."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial() if p == Replicate() else p for p in x.placements])


def to_local(x: Any) -> Any:
    """The same where every rank computes the same gradient."""
    return x.to_local() if isinstance(x, DTensor) else x


class _GatherTokens(ParallelStyle):
    """The first argument comes with some of the tokens and is handed on with all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0] if isinstance(args[0], DTensor) else DTensor.from_local(args[0], device_mesh, [Shard(1)])
            return x.redistribute(placements=[Replicate()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Scores(NoParallel):
    """A replicated gate whose scores go to experts that are cut: their gradient is partial."""

    def __init__(self) -> None:
        super().__init__(use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, args, output: to_heads(output))
        return module


class _Heads(ParallelStyle):
    """Runs on plain tensors, and gives them: this rank's heads and, whole, what all heads share."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_heads, args)))
        return module


class _Alike(ParallelStyle):
    """Runs on plain tensors, and gives them: every rank computes the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(map(to_local, args)))
        return module


def share_out(model: DeepSeekV32Model, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """All of the model but its experts."""
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
        _share_out_block(block, mesh)


def _share_out_block(block: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": _GatherTokens(),
        **{f"attention.{name}": NoParallel(use_local_output=False) for name in REPLICATED},
        **{f"attention.indexer.{name}": NoParallel(use_local_output=False) for name in INDEXER},
        "attention.wq_b": ColwiseParallel(use_local_output=False),
        "attention.wkv_b": ColwiseParallel(use_local_output=False),
        "attention.rotary": _Heads(),
        "attention.indexer.rotary": _Alike(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
    }
    if not block.moe_enabled:
        plan["feed_forward"] = _GatherTokens()
        for name in ("w1", "w3"):
            plan[f"feed_forward.{name}"] = ColwiseParallel()
        plan["feed_forward.w2"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(block, mesh, plan)
    _share_out_core(block.attention, mesh)


def _share_out_core(attention: Attention, mesh: DeviceMesh) -> None:
    """The core has no parameters; what it is given is made plain, and the heads' sum is taken over all of them."""

    def plain(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        main, index = args[:5], args[5:8]
        return *map(to_heads, main), *map(to_local, index), *args[8:]

    attention.core.register_forward_pre_hook(plain)
    group = mesh.get_group()

    def add_heads(target: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(target, "sum", group))

    attention.core.reduce_target = add_heads


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
        "moe.router.gate": _Scores(),
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
        "moe": _Alike(),
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
