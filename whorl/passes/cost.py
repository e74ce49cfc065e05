"""The cost model of collectives: latency (alpha) and time per byte (beta) of a link, and the threshold that follows.

A collective takes launch + steps * alpha + bytes that one rank sends * beta. With p ranks and a tensor of S bytes:

    all-reduce, ring        2 (p - 1) steps    2 (p - 1) / p * S
    all-reduce, one shot    1 step             (p - 1) * S
    reduce-scatter          p - 1 steps        (p - 1) / p * S          1 step where every pair has its own link
    all-gather of G         p - 1 steps        (p - 1) / p * G          the same

So plain sequence parallelism sends as many bytes as an all-reduce. It gains when it gathers less than it reduces: 8
bits instead of 16, or the narrow output of a down-projection. Constants come from the table below or from `measure`.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from whorl import collectives
from whorl.collectives import SCALE_BYTES
from whorl.device import HOST, default_device, synchronize

from . import agree
from .config import SequenceParallel
from .report import Report

Choice = Literal["all_reduce", "sp", "sp_int8"]
CHOICES: tuple[Choice, ...] = ("all_reduce", "sp", "sp_int8")
MOST_TOKENS = 1 << 20  # longer than any prefill: a threshold beyond it means never
NEVER = 1 << 62  # more tokens than any call has


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes per token of the collectives of one graph.

    reduced: of each all-reduce. gathered: of each gather of the rewritten graph. quantized: of the same gathers in 8
    bits, scales included; None where they are not possible. model_gathers: of each gather that the model itself has and
    that the rewrite removes.
    """

    reduced: tuple[float, ...]
    gathered: tuple[float, ...]
    quantized: tuple[float, ...] | None = None
    model_gathers: tuple[float, ...] = ()

    @classmethod
    def of_norm(cls, hidden: int, dtype: torch.dtype, gathered: int | None = None) -> "Traffic":
        """Return the traffic of one all-reduce of `hidden` channels and one gather after the norm.

        gathered: channels of the gather; default: `hidden`.
        """
        width = hidden if gathered is None else gathered
        return cls(
            reduced=(hidden * dtype.itemsize,), gathered=(width * dtype.itemsize,), quantized=(width + SCALE_BYTES,)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A range of token counts, `start` to `end` included, for which one choice is the cheapest; end None: no limit."""

    start: int
    end: int | None
    choice: Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predicts the seconds that collectives take between the ranks of one group.

    alpha: seconds per step; launch: seconds once per collective.
    bandwidth: bytes per second that one rank sends; with `per_peer` to each other rank, to `most_peers` at once.
    is_direct: every pair of ranks has its own link and the library uses it: reduce-scatter and all-gather are 1 step.
    has_one_shot: small all-reduces may send everything to every rank at once.
    switch_gain: by number of ranks, how much faster an all-reduce is than its bytes predict, because a switch sums.
    quantize: seconds that quantising the shard and dequantising the gathered tensor take, per byte gathered in 8 bits.
    fitted: by collective, measured (seconds, seconds per byte sent). On a group of `world` ranks these are used instead
        of the constants above.
    """

    name: str
    alpha: float
    bandwidth: float
    launch: float = 0.0
    per_peer: bool = False
    most_peers: int = 1 << 30
    is_direct: bool = False
    has_one_shot: bool = False
    switch_gain: Mapping[int, float] = field(default_factory=dict)
    quantize: float = 0.0
    fitted: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    world: int = 0

    # ---- one collective

    def all_reduce(self, num_bytes: float, world: int) -> float:
        """Return the seconds of an all-reduce of a tensor of `num_bytes` bytes."""
        sent = 2 * (world - 1) / world * num_bytes
        if self._is_fitted(world):
            return self._line("all_reduce", sent)
        gain = self.switch_gain.get(world, 1.0)
        two_halves = self.launch + 2 * self._steps(world) * self.alpha + sent / self._rate(world) / gain
        if not self.has_one_shot:
            return two_halves
        return min(two_halves, self.launch + self.alpha + (world - 1) * num_bytes / self._rate(world))

    def reduce_scatter(self, num_bytes: float, world: int) -> float:
        """Return the seconds of a reduce-scatter of a tensor of `num_bytes` bytes before it is scattered."""
        return self._half("reduce_scatter", num_bytes, world)

    def all_gather(self, num_bytes: float, world: int) -> float:
        """Return the seconds of an all-gather; `num_bytes` are those of the gathered tensor."""
        return self._half("all_gather", num_bytes, world)

    def all_gather_quantized(self, num_bytes: float, world: int) -> float:
        """Return the seconds of an all-gather in 8 bits, with quantising and dequantising.

        num_bytes: of the gathered 8-bit tensor.
        """
        work = 0.0 if self._is_fitted(world) else self.quantize * num_bytes
        return self._half("all_gather_quantized", num_bytes, world) + work

    def _half(self, collective: str, num_bytes: float, world: int) -> float:
        """Return the seconds of a reduce-scatter or all-gather, each of which is one half of an all-reduce."""
        sent = (world - 1) / world * num_bytes
        if self._is_fitted(world):
            return self._line(collective, sent)
        return self.launch + self._steps(world) * self.alpha + sent / self._rate(world)

    def _steps(self, world: int) -> int:
        return 1 if self.is_direct else world - 1

    def _rate(self, world: int) -> float:
        return self.bandwidth * min(world - 1, self.most_peers) if self.per_peer else self.bandwidth

    def _is_fitted(self, world: int) -> bool:
        return bool(self.fitted) and world == self.world

    def _line(self, collective: str, sent: float) -> float:
        """Return the seconds on the line fitted to the measurements, for `sent` bytes."""
        seconds, seconds_per_byte = self.fitted[collective]
        return seconds + seconds_per_byte * sent

    # ---- one graph

    def seconds(self, choice: Choice, tokens: float, world: int, traffic: Traffic) -> float:
        """Return the seconds that all collectives of one pass through the graph take.

        Raises ValueError for choice "sp_int8" when `traffic.quantized` is None.
        """
        if world == 1 or not tokens:
            return 0.0
        if choice == "all_reduce":
            gathered = sum(self.all_gather(b * tokens, world) for b in traffic.model_gathers)
            return gathered + sum(self.all_reduce(b * tokens, world) for b in traffic.reduced)
        reduced = sum(self.reduce_scatter(b * tokens, world) for b in traffic.reduced)
        if choice == "sp":
            return reduced + sum(self.all_gather(b * tokens, world) for b in traffic.gathered)
        if traffic.quantized is None:
            raise ValueError(
                "cost model: choice is 'sp_int8', and the graph has no quantised gathers; choose 'all_reduce' or 'sp'"
            )
        gathered = sum(self.all_gather_quantized(b * tokens, world) for b in traffic.quantized)
        return reduced + gathered

    def choose(self, tokens: float, world: int, traffic: Traffic, allowed: Sequence[Choice] = CHOICES) -> Choice:
        """Return the cheapest choice for `tokens`; on a tie the first of `allowed`: nothing changes without a gain."""
        possible = [c for c in allowed if c != "sp_int8" or traffic.quantized is not None]
        return min(possible, key=lambda c: self.seconds(c, tokens, world, traffic))

    def ranges(
        self, world: int, traffic: Traffic, allowed: Sequence[Choice] = CHOICES, most: int = MOST_TOKENS
    ) -> tuple[Range, ...]:
        """Return the cheapest choice for every token count from 1 on, as ranges."""

        def chosen(tokens: int) -> Choice:
            return self.choose(tokens, world, traffic, allowed)

        # Each cost is linear in the token count, or for all-reduce the lower of two lines: a grid of powers of two sees
        # every change, and bisection finds the exact count.
        grid = sorted({1, most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})
        starts = [(1, chosen(1))]
        for low, high in itertools.pairwise(grid):
            while chosen(high) != starts[-1][1]:
                change = _first_change(chosen, max(low, starts[-1][0]), high)
                starts.append((change, chosen(change)))
        ends = [*(start - 1 for start, _ in starts[1:]), None]
        return tuple(Range(start=s, end=e, choice=c) for (s, c), e in zip(starts, ends, strict=True))

    def threshold(
        self, world: int, traffic: Traffic, allowed: Sequence[Choice] = CHOICES, most: int = MOST_TOKENS
    ) -> int | None:
        """Return the token count from which an all-reduce is never the cheapest, or None if there is none.

        This is what min_tokens="auto" uses.
        """
        last = None
        for span in reversed(self.ranges(world, traffic, allowed, most)):
            if span.choice == "all_reduce":
                break
            last = span.start
        return last

    def gain(self, tokens: int, world: int, traffic: Traffic) -> tuple[float | None, int | None]:
        """Return how many times as fast a call of so many tokens communicates without all-reduces, and the threshold.

        The gain is None where nothing is sent. Gathers are in 8 bits if the traffic has quantised ones.
        """
        choice: Choice = "sp" if traffic.quantized is None else "sp_int8"
        plain, rewritten = (self.seconds(each, tokens, world, traffic) for each in ("all_reduce", choice))
        return plain / rewritten if rewritten else None, self.threshold(world, traffic, ("all_reduce", choice))


def _first_change(chosen: Callable[[int], Choice], low: int, high: int) -> int:
    """Return the smallest count in (low, high] whose choice is not that of `low`."""
    before = chosen(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chosen(middle) == before else (low, middle)
    return high


# ---- the table

# NCCL's own model (src/graph/tuning.cc): a ring of large messages costs 8.4 us once and 3.4 us a step over NVLink,
# 5.7 us over PCIe, 9.6 us over a network.
_NCCL_LAUNCH = 8.4e-6


def _quantize(rate: float) -> float:
    """Return `CostModel.quantize` for a memory bandwidth of `rate` bytes per second.

    For each 8-bit element, dequantising reads one byte and writes two, and quantising reads two and writes one: three
    bytes each. All gathered elements are dequantised, and a rank's shard of them, one eighth, is quantised.
    """
    return 3 * (1 + 1 / 8) / rate


def _nccl_model(name: str, *, alpha: float, bandwidth: float) -> CostModel:
    return CostModel(name=name, alpha=alpha, launch=_NCCL_LAUNCH, bandwidth=bandwidth, quantize=_quantize(2e12))


TABLE: dict[str, CostModel] = {
    model.name: model
    for model in (
        CostModel(
            name="h200_nvlink",
            alpha=3.4e-6,
            launch=_NCCL_LAUNCH,
            # NVLink 4 is 450 GB/s each way; 365 to 370 arrive (NVIDIA/nccl-tests#212, NVIDIA/nccl#1455).
            bandwidth=370e9,
            has_one_shot=True,
            # With NVLink SHARP the switch adds up: bus bandwidth 420, 440, 460 and 480 GB/s at 5 to 8 GPUs, no gain
            # below (NVIDIA/nccl#1455); 475 on H200 (NVIDIA/nccl-tests#272).
            switch_gain={5: 420 / 370, 6: 440 / 370, 7: 460 / 370, 8: 480 / 370},
            quantize=_quantize(4.28e12),  # bench/results/ops_h200.md
        ),
        CostModel(
            name="ascend_910_hccs",
            # Of the order that is reported for one collective on an 8-NPU server; HCCL publishes no constants.
            alpha=0.0,
            launch=20e-6,
            # A full mesh of eight with 28 GB/s each way on every link: the standard that Ascend's profiler holds HCCS
            # to (msprof, HCCS_BANDWIDTH_V4_1_0), 392 GB/s both ways in the data sheet of Atlas 800T A2.
            bandwidth=28e9,
            per_peer=True,
            most_peers=7,
            is_direct=True,
            has_one_shot=True,
            quantize=_quantize(1.6e12),  # HBM of 910B
        ),
        # PCIe 4.0 x16 is 31.5 GB/s each way; 20 is what Ascend's profiler holds PCIe to (msprof) and what
        # NVIDIA/nccl-tests#178 reports once a path leaves NVLink.
        _nccl_model("pcie", alpha=5.7e-6, bandwidth=20e9),
        # 100 Gbit/s, one port a rank: 12.5 GB/s, which RDMA reaches (msprof, RDMA_BANDWIDTH_V2_1_0).
        _nccl_model("ethernet", alpha=9.6e-6, bandwidth=12.5e9),
    )
}


def table(name: str) -> CostModel:
    """Return the cost model of a link of the table; raises ValueError for a name that is not in it."""
    if name not in TABLE:
        raise ValueError(f"cost model: no link {name!r} in the table. Has: {', '.join(TABLE)}")
    return TABLE[name]


# ---- measuring


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


# ---- the threshold of a graph


def least_tokens(config: SequenceParallel, report: Report) -> int:
    """Return `config.min_tokens`; for "auto" the count from which the cost model predicts a gain, or NEVER.

    Where a cost model is used, `report.predicted_gain` is set as well.
    """
    is_auto = config.min_tokens == "auto"
    if config.cost is None and not is_auto:
        return int(config.min_tokens)
    model = config.cost or local_cost_model(report.group)
    traffic = _traffic(report)
    report.predicted_gain, threshold = model.gain(report.tokens or 1, report.size, traffic)
    if not is_auto:
        return int(config.min_tokens)
    return NEVER if threshold is None else threshold


def _traffic(report: Report) -> Traffic:
    """Return the bytes per token of the collectives that were rewritten, and of the gathers in their place."""
    reduced, model_gathers = (
        tuple(float(c.row_bytes) for c in report.collectives if c.rewritten and c.kind == kind)
        for kind in ("all_reduce", "all_gather")
    )
    gathered = tuple(float(g.row_bytes) for g in report.gathers)
    return Traffic(
        reduced=reduced,
        gathered=gathered,
        quantized=gathered if report.is_quantized else None,
        model_gathers=model_gathers,
    )


def local_cost_model(group: str) -> CostModel:
    """Return the cost model measured between these ranks; where there is only one, the table's for NVLink."""
    return table("h200_nvlink") if agree.is_alone(group) else measure(group)
