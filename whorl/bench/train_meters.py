"""Measures time, memory and kernels of training steps on the device."""

import time
from typing import Any

import torch

from whorl import device as devices
from whorl.bench.provenance import Document
from whorl.bench.train_model import Trainee

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
