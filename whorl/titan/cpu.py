"""Run TorchTitan 0.2.2 on CPU ranks, for tests and laptops.

Every change to TorchTitan or torch that this needs is an entry of `LEDGER`. `install()` makes the changes, once per
process and only when it is called; on an accelerator nothing here runs.

    torchrun --nproc-per-node 2 -m whorl.titan.cpu --job.config_file FILE    # TorchTitan's own trainer
"""

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from whorl.device import HOST

_installed = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shim:
    """A change to TorchTitan or torch: what is changed, why, and when the change can go."""

    change: str
    why: str
    until: str
    install: Callable[[], None]


def _rebind(home: str, name: str, new: object) -> None:
    """Set `name` in module `home` and in every module of TorchTitan that has imported it from there."""
    old = getattr(importlib.import_module(home), name)
    for module_name, module in list(sys.modules.items()):
        is_theirs = module_name.split(".")[0] == "torchtitan"
        if is_theirs and getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _host_module() -> types.ModuleType:
    """Return a module like torch.cpu with the functions of torch.cuda that TorchTitan calls.

    The peak memory that it reports is the peak resident memory of this process.
    """
    module = types.ModuleType("torch_cpu_for_torchtitan")
    module.__dict__.update({n: v for n, v in vars(torch.cpu).items() if not n.startswith("__")})
    memory = _physical_memory()
    functions: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda device=None: HOST,
        "get_device_properties": lambda device=None: types.SimpleNamespace(name=HOST, total_memory=memory),
        "memory_stats": lambda device=None: _memory_stats(),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    module.__dict__.update(functions)
    return module


def _memory_stats() -> dict[str, int]:
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 1 << 33


def _use_host() -> None:
    module = _host_module()
    for name, new in (("device_type", HOST), ("device_module", module), ("get_device_info", lambda: (HOST, module))):
        _rebind("torchtitan.tools.utils", name, new)


def _set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    torch.distributed.barrier()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [*(mesh.get_group() for mesh in meshes), None]:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def _disable_gradient_division(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _wrap_histc() -> None:
    torch_histc = torch.histc

    @functools.wraps(torch_histc)
    def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0, **more: Any) -> Tensor:
        if input.device.type != HOST or input.is_floating_point():
            return torch_histc(input, bins, min, max, **more)
        if min != 0 or max != bins:
            raise ValueError(f"histc of integers: bins {bins}, from {min} to {max}; expected one bin for each number")
        ones = torch.ones_like(input).reshape(-1)
        return torch.zeros(bins, dtype=input.dtype).scatter_add_(0, input.reshape(-1).long(), ones)

    torch.histc = histc  # type: ignore[assignment]


def _permute_on_host() -> None:
    from torchtitan.models.moe.kernels import generate_permute_indices

    _rebind(
        "torchtitan.models.moe.utils",
        "generate_permute_indices",
        functools.partial(generate_permute_indices, use_cpu=True),
    )


LEDGER = [
    Shim(
        change="torchtitan.tools.utils: device_type, device_module and get_device_info are those of the CPU",
        why="without an accelerator TorchTitan assumes 'cuda'; torch.cpu has no memory statistics and device names",
        until="TorchTitan chooses cpu by itself",
        install=_use_host,
    ),
    Shim(
        change="torchtitan.distributed.utils.set_pg_timeouts calls the barrier without device_ids",
        why="the barrier of gloo does not accept device_ids",
        until="TorchTitan omits device_ids on a CPU",
        install=lambda: _rebind("torchtitan.distributed.utils", "set_pg_timeouts", _set_pg_timeouts),
    ),
    Shim(
        change="torchtitan.models.llama3.infra.parallelize.disable_fsdp_gradient_division also forces plain sums",
        why="a divide factor of 1 makes FSDP2 use PREMUL_SUM, which gloo does not have",
        until="FSDP2 uses a plain sum for a factor of 1",
        install=lambda: _rebind(
            "torchtitan.models.llama3.infra.parallelize", "disable_fsdp_gradient_division", _disable_gradient_division
        ),
    ),
    Shim(
        change="torch.histc counts integers on a CPU, one bin for each number",
        why="the router counts tokens with histc on int64, which torch implements on accelerators only",
        until="torch.histc accepts integers on a CPU",
        install=_wrap_histc,
    ),
    Shim(
        change="torchtitan.models.moe.utils.generate_permute_indices runs its own CPU path",
        why="the default is a Triton kernel, and the callers do not pass use_cpu",
        until="it chooses by the device of the tensor",
        install=_permute_on_host,
    ),
]


def install() -> None:
    """Make every change of `LEDGER` in this process."""
    global _installed
    if _installed:
        return
    _installed = True
    for shim in LEDGER:
        shim.install()


def main() -> None:
    """Run TorchTitan's own trainer with our models and converters registered."""
    install()
    import torchtitan.train

    from whorl.titan.register import register

    register()
    torchtitan.train.main(torchtitan.train.Trainer)


if __name__ == "__main__":
    main()
