"""TorchTitan's optimizers with two switches more: moments on the host, and a stop before an update that is not finite.

The containers, the hook that balances experts and the checkpoint format are TorchTitan's own.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.ft import FTManager
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers_with_moe_load_balancing
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import MoE

from whorl.titan.swap_optimizer import SwapAdamW
from whorl.titan.watch import Watch


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: FTManager | None = None,
) -> OptimizersContainer:
    """As TorchTitan's `build_optimizers_with_moe_load_balancing`; frozen parameters have no state."""
    _check_learns(model_parts)
    swap = getattr(optimizer_config, "swap", False)
    if swap:
        _check_swap(optimizer_config, ft_manager)
    optimizers = build_optimizers_with_moe_load_balancing(model_parts, optimizer_config, parallel_dims, ft_manager)
    others = list(_beside_layers(model_parts))
    if others:
        optimizers.register_step_pre_hook(lambda *_: _balance(others, parallel_dims))
    if swap:
        optimizers.optimizers = [_swapped(o, optimizer_config) for o in optimizers.optimizers]
    if getattr(optimizer_config, "watch", True) and dist.get_backend() != "fake":
        Watch.attach(optimizers, can_replay=not parallel_dims.pp_enabled)
    return optimizers


def _check_learns(model_parts: list[nn.Module]) -> None:
    for part in model_parts:
        if not any(p.requires_grad for p in part.parameters()):
            found = ", ".join(name for name, module in part.named_children() if any(True for _ in module.parameters()))
            raise ValueError(
                f"a pipeline stage ({found}) has nothing that learns: in warm-up only indexers do. Give every stage a "
                "layer: fewer stages, or set parallelism.module_fqns_per_model_part"
            )


def _check_swap(config: OptimizerConfig, ft_manager: FTManager | None) -> None:
    wanted = {"name": "AdamW", "implementation": "fused", "early_step_in_backward": False}
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"optimizer.swap takes optimizer.{field} = {value!r}, got {getattr(config, field)!r}: "
                "change that, or do without optimizer.swap"
            )
    if ft_manager is not None and ft_manager.enabled:
        raise ValueError("optimizer.swap does not go with fault_tolerance.enable: TorchFT has an optimizer of its own")


def _swapped(plain: torch.optim.Optimizer, config: OptimizerConfig) -> SwapAdamW:
    """In the place of an optimizer that has no state yet."""
    kept = ("params", "lr", "betas", "eps", "weight_decay", "maximize", "amsgrad")
    groups: list[dict[str, Any]] = [{name: group[name] for name in kept} for group in plain.param_groups]
    defaults = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
    return SwapAdamW(groups, **defaults, moments=getattr(config, "moments", "exact"))


def _beside_layers(model_parts: list[nn.Module]) -> Iterator[MoE]:
    """Experts that TorchTitan's hook does not reach: those of multi-token prediction."""
    for part in model_parts:
        layers = {*part.get_submodule("layers").modules()}
        for module in part.modules():
            if isinstance(module, MoE) and module.load_balance_coeff and module not in layers:
                yield module


@torch.no_grad()
def _balance(experts: list[MoE], parallel_dims: ParallelDims) -> None:
    """Move each bias towards even loads by a fixed amount, as TorchTitan does."""
    counts = torch.stack([cast(Tensor, moe.tokens_per_expert) for moe in experts])
    mesh = parallel_dims.get_optional_mesh("loss")
    if mesh is not None:
        dist.all_reduce(counts, group=mesh.get_group())
    for moe, count in zip(experts, counts, strict=True):
        delta = moe.load_balance_coeff * torch.sign(count.mean() - count)
        cast(Tensor, moe.expert_bias).add_(delta - delta.mean())
        cast(Tensor, moe.tokens_per_expert).zero_()
