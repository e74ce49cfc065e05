"""Timing of calls on a device, by replayed graphs without launch gaps, or by events where no graph can be recorded."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whorl import device as devices

Run = Callable[[], Any]

# Bytes written between two timed calls to flush the cache: more than the 192 MB cache of an Ascend 910B.
FLUSH_BYTES = 256 * 2**20
SHORT_BYTES = 32 * 2**20  # below this a call ends sooner than the host can launch the next one (8 us at 4 TB/s)
SHORT_LAUNCHES = 128
LONG_LAUNCHES = 8
REPEATS, FEWEST = 100, 5  # the most and the fewest repeats of a measurement
BUDGET_US = 1e6  # of one measurement: long calls are repeated less often
CALL_US = 2e4  # for longer calls the launch gap is negligible and no graph is recorded
SLOW_US = 5e5  # a longer call is timed once


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The time of a call. us: median microseconds; how: the method, as text; hot_us: `us` with inputs in the cache."""

    us: float
    how: str
    hot_us: float | None = None


def matmul_rate(dtype: torch.dtype, device: str) -> float:
    """Return the operations per second of a large square matrix product of normal numbers, as a yardstick."""
    size = 256 if devices.accelerator(device) is None else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (measure([lambda: a @ b], device).us * 1e-6)


def bandwidth(num_bytes: int, us: float) -> str:
    """Return bytes per time as text, in TB/s or GB/s."""
    rate = num_bytes / us / 1e6  # TB/s
    return f"{rate:.2f} TB/s" if rate >= 0.1 else f"{rate * 1e3:.2f} GB/s"


def operations(rate: float) -> str:
    """Return operations per second as text, in TFLOP/s or GFLOP/s."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def is_short(num_bytes: int, device: str) -> bool:
    """Return whether a call moves so few bytes that the host's launches would dominate its time."""
    return devices.accelerator(device) is not None and num_bytes < SHORT_BYTES


def num_buffers(num_bytes: int, device: str) -> int:
    """Return how many sets of arguments to use in turn, so that together they exceed the cache."""
    if devices.accelerator(device) is None:
        return 1
    count = math.ceil(2 * FLUSH_BYTES / num_bytes)
    return min(SHORT_LAUNCHES, max(16, count)) if is_short(num_bytes, device) else count


def measure(runs: Sequence[Run], device: str, *, short: bool = False, recorded: bool = True) -> Timing:
    """Return the median time of one call. `runs` are the same call on different buffers.

    short: the call moves few bytes (`is_short`). It is then timed twice: with cold buffers (`us`), and repeatedly on
    the first buffer (`hot_us`), since between two small kernels of a decode step its inputs are in the cache.
    recorded: False times calls one by one. So is a call that a graph cannot record, since it reads from the device.
    """
    if devices.accelerator(device) is None:
        return Timing(us=_by_clock(runs[0]), how="wall clock")
    runs[0]()
    first = _between_events(runs[0], device, repeats=1)
    if first > SLOW_US:
        return Timing(us=first, how="one call")
    for run in runs[1:3]:
        run()
    if recorded and first < CALL_US:
        with contextlib.suppress(RuntimeError):  # a graph cannot record a call that reads a value back
            if (timing := _by_graph(runs, device, short)) is not None:
                return timing
    return Timing(us=_by_events(runs[0], device), how="events, cache flushed")


def _by_clock(run: Run, seconds: float = 0.04, least: int = 3) -> float:
    run()
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds and len(times) < REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _by_graph(runs: Sequence[Run], device: str, short: bool) -> Timing | None:
    rounds = math.ceil((SHORT_LAUNCHES if short else LONG_LAUNCHES) / len(runs))
    launches = len(runs) * rounds
    results: list[Any] = []  # they stay alive for short calls, or every launch would write the same, cached memory
    keep = results.append if short else lambda result: None
    cold = devices.record_graph(device, lambda: [keep(run()) for _ in range(rounds) for run in runs])
    if cold is None:
        return None
    us = _between_events(cold, device, repeats=_repeats(cold, device, 20)) / launches
    how = f"graph of {launches} launches over {len(runs)} buffers"
    hot = devices.record_graph(device, lambda: _repeat(runs[0], SHORT_LAUNCHES)) if short else None
    if hot is None:
        return Timing(us=us, how=how)
    return Timing(us=us, how=how, hot_us=_between_events(hot, device, repeats=20) / SHORT_LAUNCHES)


def _repeat(run: Run, times: int) -> None:
    for _ in range(times):
        run()


def _by_events(run: Run, device: str) -> float:
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    times = _backlog(run, flush.zero_, device)
    return _between_events(run, device, repeats=_repeats(run, device, REPEATS), before=flush.zero_, times=times)


def _repeats(run: Run, device: str, most: int) -> int:
    return max(FEWEST, min(most, int(BUDGET_US / max(1.0, _between_events(run, device, repeats=1)))))


def _between_events(run: Run, device: str, *, repeats: int, before: Run | None = None, times: int = 0) -> float:
    """Return the median microseconds that the device spends on `run`; `before` runs `times` times first, untimed."""
    pairs = [(devices.timing_event(device), devices.timing_event(device)) for _ in range(repeats)]
    for start, end in pairs:
        for _ in range(times):
            assert before is not None
            before()
        start.record()
        run()
        end.record()
    devices.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def _backlog(run: Run, flush: Run, device: str) -> int:
    """Return how many flushes keep the device busy while the host launches `run`, so that no launch gap is timed."""
    devices.synchronize(device)
    start = time.perf_counter()
    run()
    host = (time.perf_counter() - start) * 1e6
    devices.synchronize(device)
    return 1 + math.ceil(host / _between_events(flush, device, repeats=5))
