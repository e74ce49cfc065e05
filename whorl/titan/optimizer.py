"""Build TorchTitan's optimizers with two more options: `swap` keeps moments on the host, `watch` stops at a NaN.

The containers, the hook that balances experts and the checkpoint format are those of TorchTitan.
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

from whorl.titan.nan_watch import NaNWatch
from whorl.titan.swap_optimizer import SwapAdamW


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: FTManager | None = None,
) -> OptimizersContainer:
    """Return the optimizers for a `TrainSpec`, as TorchTitan's `build_optimizers_with_moe_load_balancing` does.

    Frozen parameters have no state. Raises ValueError when a model part has nothing to train, or when optimizer.swap
    contradicts another option.
    """
    _check_trainable(model_parts)
    swap = getattr(optimizer_config, "swap", False)
    if swap:
        _check_swap(optimizer_config, ft_manager)
    optimizers = build_optimizers_with_moe_load_balancing(model_parts, optimizer_config, parallel_dims, ft_manager)
    mtp_experts = list(_moe_outside_layers(model_parts))
    if mtp_experts:
        optimizers.register_step_pre_hook(lambda *_: _update_expert_biases(mtp_experts, parallel_dims))
    if swap:
        optimizers.optimizers = [_swap_optimizer(o, optimizer_config) for o in optimizers.optimizers]
    if getattr(optimizer_config, "watch", True) and dist.get_backend() != "fake":  # a dry run computes no real values
        NaNWatch.attach(optimizers, can_replay=not parallel_dims.pp_enabled)
    return optimizers


def _check_trainable(model_parts: list[nn.Module]) -> None:
    for part in model_parts:
        if not any(p.requires_grad for p in part.parameters()):
            modules = ", ".join(
                name for name, module in part.named_children() if any(True for _ in module.parameters())
            )
            raise ValueError(
                f"a pipeline stage ({modules}) has no trainable parameters: in warm-up only indexers train. Give every "
                "stage a layer: use fewer stages, or set parallelism.module_fqns_per_model_part"
            )


def _check_swap(config: OptimizerConfig, ft_manager: FTManager | None) -> None:
    required = {"name": "AdamW", "implementation": "fused", "early_step_in_backward": False}
    for field, value in required.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"optimizer.{field} is {getattr(config, field)!r}, optimizer.swap expects {value!r}; "
                "change it, or remove optimizer.swap"
            )
    if ft_manager is not None and ft_manager.enabled:
        raise ValueError(
            "optimizer.swap and fault_tolerance.enable exclude each other: TorchFT brings its own optimizer"
        )


def _swap_optimizer(plain: torch.optim.Optimizer, config: OptimizerConfig) -> SwapAdamW:
    """Return a SwapAdamW with the parameters and options of an optimizer that has no state yet."""
    names = ("params", "lr", "betas", "eps", "weight_decay", "maximize", "amsgrad")
    groups: list[dict[str, Any]] = [{name: group[name] for name in names} for group in plain.param_groups]
    defaults = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
    prefetch = getattr(config, "swap_prefetch", None)
    return SwapAdamW(
        groups,
        **defaults,
        moments=getattr(config, "moments", "exact"),
        ring=getattr(config, "swap_ring", 3),
        prefetch="auto" if prefetch is None else prefetch,
    )


def _moe_outside_layers(model_parts: list[nn.Module]) -> Iterator[MoE]:
    """Yield the MoE modules that TorchTitan's load-balancing hook skips: those of multi-token prediction."""
    for part in model_parts:
        layers = {*part.get_submodule("layers").modules()}
        for module in part.modules():
            if isinstance(module, MoE) and module.load_balance_coeff and module not in layers:
                yield module


@torch.no_grad()
def _update_expert_biases(experts: list[MoE], parallel_dims: ParallelDims) -> None:
    """Move each expert bias by a fixed amount towards an even load, as TorchTitan does, and reset the token counts."""
    counts = torch.stack([cast(Tensor, moe.tokens_per_expert) for moe in experts])
    mesh = parallel_dims.get_optional_mesh("loss")
    if mesh is not None:
        dist.all_reduce(counts, group=mesh.get_group())
    for moe, count in zip(experts, counts, strict=True):
        delta = moe.load_balance_coeff * torch.sign(count.mean() - count)
        cast(Tensor, moe.expert_bias).add_(delta - delta.mean())
        cast(Tensor, moe.tokens_per_expert).zero_()
