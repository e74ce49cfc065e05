"""Measure the cost model of this machine: time its collectives, and fit latency and seconds per byte."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whorl import collectives
from whorl.collectives import SCALE_BYTES
from whorl.device import HOST, default_device, synchronize

from .cost import CostModel


def measure(
    group: Any = None, *, num_bytes: Sequence[int] = (1 << 13, 1 << 18, 1 << 21), repeats: int = 5
) -> CostModel:
    """Measure the collectives that the passes use on this group and return its cost model.

    group: a process group, its name, or None for all processes; every rank must call this. num_bytes: sizes to time;
    repeats: calls per size. Takes about a second; returns the same model on every rank.
    Example: SequenceParallel(cost=measure())
    """
    name = collectives.group_name(group)
    world = collectives.group_size(name)
    if world == 1:
        return CostModel(name="measured", alpha=0.0, bandwidth=float("inf"))
    device = HOST if dist.get_backend(collectives.process_group(name)) == "gloo" else default_device()
    fitted = {collective: _fit(_times(collective, name, device, num_bytes, repeats)) for collective in _TIMED}
    seconds, seconds_per_byte = fitted["reduce_scatter"]
    return CostModel(name="measured", alpha=seconds, bandwidth=1 / seconds_per_byte, fitted=fitted, world=world)


# Each takes a bf16 tensor [rows, channels], rows being a multiple of the ranks, and the group's name.
_TIMED: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_reduce": collectives.ordered_all_reduce,
    "reduce_scatter": collectives.ordered_reduce_scatter,
    "all_gather": lambda x, group: collectives.all_gather(collectives.local_rows(x, group), x.shape[0], group),
    "all_gather_quantized": lambda x, group: collectives.all_gather_quantized(
        collectives.local_rows(x, group), x.shape[0], group, "int8"
    ),
}
_CHANNELS = 2048
_LONG = 0.1  # seconds; larger sizes are not timed once one call takes longer


def _sent(collective: str, rows: int, world: int) -> float:
    """Return the bytes that one rank sends."""
    row_bytes = _CHANNELS + SCALE_BYTES if collective == "all_gather_quantized" else 2 * _CHANNELS
    return (2 if collective == "all_reduce" else 1) * (world - 1) / world * rows * row_bytes


def _times(
    collective: str, group: str, device: str, num_bytes: Sequence[int], repeats: int
) -> list[tuple[float, float]]:
    """Return (bytes sent, seconds) for each size: the median over a rank's calls, the mean over ranks.

    On a slow link the largest sizes are left out: two points make a line.
    """
    ranks, world, run = collectives.process_group(group), collectives.group_size(group), _TIMED[collective]
    points = []
    for size in num_bytes:
        rows = world * max(1, size // (2 * _CHANNELS * world))
        x = torch.ones(rows, _CHANNELS, dtype=torch.bfloat16, device=device)
        run(x, group)
        times = []
        for _ in range(repeats):
            dist.barrier(ranks)
            synchronize(device)
            start = time.perf_counter()
            run(x, group)
            synchronize(device)
            times.append(time.perf_counter() - start)
        seconds = torch.tensor([statistics.median(times)], device=device)
        dist.all_reduce(seconds, group=ranks)
        points.append((_sent(collective, rows, world), seconds.item() / world))
        if len(points) > 1 and points[-1][1] > _LONG:
            break
    return points


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line through (bytes, seconds); return the seconds at zero bytes and the seconds per byte.

    Squares of the relative error are minimised, so that small messages count as much as large ones.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = sum(w * (b - x) * (s - y) for w, (b, s) in zip(weights, points, strict=True)) / spread
    slope = max(slope, 1e-15)  # measurement noise can make it negative on a fast link
    return max(y - slope * x, 0.0), slope
