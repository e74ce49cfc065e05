"""Measures time, memory and kernels of training steps on the device."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.bench.provenance import Document
from whorl.bench.train_model import Trainee
from whorl.streams import Stream

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
        for is_timed in (False, True):
            clock.lap()
            for _ in range(repeats if is_timed else 1):
                for copy in copies:
                    copy()
        speeds[name] = repeats * num_bytes / clock.lap() / 1e9
    return speeds


def _copies(device: str, target: Tensor, source: Tensor) -> Callable[[], None]:
    """Return a function that starts a copy on a stream of its own."""
    stream = Stream(device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def start() -> None:
        stream.run(copy)

    return start


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
