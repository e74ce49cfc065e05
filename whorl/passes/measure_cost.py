"""The cost model of this machine: its collectives timed, alpha and beta fitted."""

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
    """The cost model of this group as it is now, from the collectives that the passes use; the same on every rank."""
    name = collectives.group_name(group)
    world = collectives.group_size(name)
    if world == 1:
        return CostModel(name="measured", alpha=0.0, bandwidth=float("inf"))
    device = HOST if dist.get_backend(collectives.process_group(name)) == "gloo" else default_device()
    fitted = {what: _fit(_times(what, name, device, num_bytes, repeats)) for what in _TIMED}
    seconds, a_byte = fitted["reduce_scatter"]
    return CostModel(name="measured", alpha=seconds, bandwidth=1 / a_byte, fitted=fitted, world=world)


# Each takes [p rows, channels] of bf16 in all, and the group's name.
_TIMED: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_reduce": collectives.ordered_all_reduce,
    "reduce_scatter": collectives.ordered_reduce_scatter,
    "all_gather": lambda x, group: collectives.all_gather(collectives.local_rows(x, group), x.shape[0], group),
    "all_gather_quantized": lambda x, group: collectives.all_gather_quantized(
        collectives.local_rows(x, group), x.shape[0], group, "int8"
    ),
}
_CHANNELS = 2048
_LONG = 0.1  # seconds


def _sent(what: str, rows: int, world: int) -> float:
    """Bytes that a rank sends."""
    row = _CHANNELS + SCALE_BYTES if what == "all_gather_quantized" else 2 * _CHANNELS
    return (2 if what == "all_reduce" else 1) * (world - 1) / world * rows * row


def _times(what: str, group: str, device: str, num_bytes: Sequence[int], repeats: int) -> list[tuple[float, float]]:
    """(bytes sent, seconds) for each size; seconds are the median of a rank's calls, the mean over ranks.

    On a slow link the largest sizes are left out: two points make a line.
    """
    ranks, world, run = collectives.process_group(group), collectives.group_size(group), _TIMED[what]
    found = []
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
        mine = torch.tensor([statistics.median(times)], device=device)
        dist.all_reduce(mine, group=ranks)
        found.append((_sent(what, rows, world), mine.item() / world))
        if len(found) > 1 and found[-1][1] > _LONG:
            break
    return found


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds and seconds a byte: least squares of the relative error, so that small messages count as large do."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = sum(w * (b - x) * (s - y) for w, (b, s) in zip(weights, points, strict=True)) / spread
    slope = max(slope, 1e-15)  # noise on a link faster than the clock
    return max(y - slope * x, 0.0), slope
