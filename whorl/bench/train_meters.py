"""Measures time, memory and kernels of training steps, and says what the planner and the device's peak promise."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.bench.provenance import Document
from whorl.bench.train_model import CHUNK, Trainee, host_format
from whorl.plan import layout as plan_layout
from whorl.plan.hardware import HARDWARE
from whorl.plan.memory import GB, memory_of
from whorl.plan.model_shape import from_hugging_face
from whorl.streams import Stream
from whorl.titan.deepseek_v32.args import DeepSeekV32Args
from whorl.titan.deepseek_v32.hf import to_hf_config
from whorl.titan.moments import FORMATS

LARGEST = 25  # number of kernels that a profile lists


def profile(trainee: Trainee) -> list[Document]:
    """Run one more step; returns {"name", "count", "ms"} of all kernels together and of those that took longest."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trainee.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    on_device = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in on_device if not e.is_user_annotation]  # an annotation spans many, as the optimizer's step
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = {"name": "all kernels", "count": sum(e.count for e in kernels)}
    total["ms"] = sum(e.self_device_time_total for e in kernels) / 1e3
    rows = [{"name": e.key[:120], "count": e.count, "ms": e.self_device_time_total / 1e3} for e in kernels[:LARGEST]]
    return [total, *rows]


class Clock:
    """A stopwatch that waits for the device. `lap` returns the seconds since the last lap."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.lap()

    def lap(self) -> float:
        devices.synchronize(self._device)
        now = time.perf_counter()
        since, self._last = now - getattr(self, "_last", now), now
        return since


def measure_link(device: str, num_bytes: int = 1 << 30, repeats: int = 5) -> dict[str, float]:
    """Return the GB/s of copies between pinned host memory and the device, by direction.

    "both": the speed of each direction while copies run in both at once, as in a step with swapped moments.
    """
    hosts = [devices.host_buffer(num_bytes, device) for _ in range(2)]
    buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    load = _copies(device, buffers[0], hosts[0])
    store = _copies(device, hosts[1], buffers[1])
    speeds, clock = {}, Clock(device)
    for name, copies in {"to_device": [load], "to_host": [store], "both": [load, store]}.items():
        for count in (1, repeats):  # the first copy warms up
            clock.lap()
            for copy in copies * count:
                copy()
        speeds[name] = repeats * num_bytes / clock.lap() / 1e9
    return speeds


def _copies(device: str, target: Tensor, source: Tensor) -> Callable[[], None]:
    """Return a function that starts a copy on a stream of its own."""
    stream = Stream(device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return lambda: stream.run(copy)


def reset_peak(device: str) -> None:
    """Reset the peak memory counters of an accelerator."""
    module: Any = devices.accelerator(device)
    if module is not None:
        module.reset_peak_memory_stats()


def peak_memory(device: str) -> Document:
    """Return the peak memory since `reset_peak`; None on the CPU, where it is not counted."""
    module: Any = devices.accelerator(device)
    if module is None:
        return {"allocated_bytes": None, "reserved_bytes": None}
    return {"allocated_bytes": module.max_memory_allocated(), "reserved_bytes": module.max_memory_reserved()}


# ---- predictions


def predict(args: DeepSeekV32Args, seq: int, switches: frozenset[str], dtype: torch.dtype, ring: int = 3) -> float:
    """Return the planner's peak bytes of a step. dtype: of weights and gradients, and of moments on the device."""
    size, moments = dtype.itemsize, host_format(switches)
    settings = plan_layout.PlanSettings(
        seq=seq,
        batch=1,
        weight=size,
        gradient=size,
        moment=sum(part.itemsize / values for part, values in FORMATS[moments or "exact"][0].parts(dtype)),
        compute=size,
        checkpoint="checkpoint" in switches,
        fused="dsa" in switches,
        chunk=CHUNK,
        ring=ring,
    )
    alone = plan_layout.Parallelism(pp=1, tp=1, cp=1, dp=1, ep=1, swap=moments is not None)
    return memory_of(from_hugging_face(to_hf_config(args), "trained here"), alone, settings).allocated * GB


def peak_flops(device: str) -> float | None:
    """Return the dense bf16 peak of the device; None for hardware that the planner does not know."""
    name = devices.device_name(device).lower()
    return next((hardware.flops for hardware in HARDWARE.values() if hardware.name in name), None)
