"""What collectives cost: alpha and beta of a link, from a table or measured, and the choice that follows.

A collective takes launch + steps * alpha + bytes that one rank sends * beta. With p ranks and a tensor of S bytes:

    all-reduce, ring        2 (p - 1) steps    2 (p - 1) / p * S
    all-reduce, one shot    1 step             (p - 1) * S
    reduce-scatter          p - 1 steps        (p - 1) / p * S          1 step where every pair has its own way
    all-gather of G         p - 1 steps        (p - 1) / p * G          the same

so plain sequence parallelism sends what an all-reduce does, and gains by gathering less than it reduces: 8 bits, or
what comes out of a down-projection.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from whorl.collectives import SCALE_BYTES

from .config import TokenRange

Choice = Literal["all_reduce", "sp", "sp_int8"]
CHOICES: tuple[Choice, ...] = ("all_reduce", "sp", "sp_int8")
MOST_TOKENS = 1 << 20  # no prefill is longer: past it a threshold is never


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes a token of one graph: of each all-reduce, and of each gather that sequence parallelism puts in its place.

    `quantized`: the same gathers in 8 bits, scales included; None where they are not on offer. `own`: gathers that the
    model has by itself and that go, too.
    """

    reduced: tuple[float, ...]
    gathered: tuple[float, ...]
    quantized: tuple[float, ...] | None = None
    own: tuple[float, ...] = ()

    @classmethod
    def of_norm(cls, hidden: int, dtype: torch.dtype, gathered: int | None = None) -> "Traffic":
        """One all-reduce of `hidden` channels and one gather of `gathered` (the same, unless said) after the norm."""
        width = hidden if gathered is None else gathered
        return cls(
            reduced=(hidden * dtype.itemsize,), gathered=(width * dtype.itemsize,), quantized=(width + SCALE_BYTES,)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Range(TokenRange):
    """Those that take one choice."""

    choice: Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds of collectives between the ranks of one group.

    bandwidth: bytes a second that one rank sends; with `per_peer` to each other rank, of which `most_peers` at once.
    is_direct: every pair has its own way and the library uses it: reduce-scatter and all-gather take one step each.
    has_one_shot: small all-reduces may send everything to everyone at once.
    switch_gain: by ranks, how much faster an all-reduce is than its bytes say, because a switch does the sum.
    quantize: seconds for each byte gathered in 8 bits that quantising on the shard and restoring the whole take.
    fitted: (seconds, seconds a byte sent) by collective, as measured on a group of `world` ranks.
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
        sent = 2 * (world - 1) / world * num_bytes
        if self._is_fitted(world):
            return self._line("all_reduce", sent)
        gain = self.switch_gain.get(world, 1.0)
        two_halves = self.launch + 2 * self._steps(world) * self.alpha + sent / self._rate(world) / gain
        if not self.has_one_shot:
            return two_halves
        return min(two_halves, self.launch + self.alpha + (world - 1) * num_bytes / self._rate(world))

    def reduce_scatter(self, num_bytes: float, world: int) -> float:
        return self._half("reduce_scatter", num_bytes, world)

    def all_gather(self, num_bytes: float, world: int) -> float:
        """`num_bytes` of the gathered tensor."""
        return self._half("all_gather", num_bytes, world)

    def all_gather_quantized(self, num_bytes: float, world: int) -> float:
        """`num_bytes` of what is gathered in 8 bits; quantising and restoring included."""
        work = 0.0 if self._is_fitted(world) else self.quantize * num_bytes
        return self._half("all_gather_quantized", num_bytes, world) + work

    def _half(self, what: str, num_bytes: float, world: int) -> float:
        sent = (world - 1) / world * num_bytes
        if self._is_fitted(world):
            return self._line(what, sent)
        return self.launch + self._steps(world) * self.alpha + sent / self._rate(world)

    def _steps(self, world: int) -> int:
        return 1 if self.is_direct else world - 1

    def _rate(self, world: int) -> float:
        return self.bandwidth * min(world - 1, self.most_peers) if self.per_peer else self.bandwidth

    def _is_fitted(self, world: int) -> bool:
        return bool(self.fitted) and world == self.world

    def _line(self, what: str, sent: float) -> float:
        seconds, a_byte = self.fitted[what]
        return seconds + a_byte * sent

    # ---- one graph

    def seconds(self, choice: Choice, tokens: float, world: int, traffic: Traffic) -> float:
        """What the collectives of one pass through the graph take."""
        if world == 1 or not tokens:
            return 0.0
        if choice == "all_reduce":
            own = sum(self.all_gather(b * tokens, world) for b in traffic.own)
            return own + sum(self.all_reduce(b * tokens, world) for b in traffic.reduced)
        reduced = sum(self.reduce_scatter(b * tokens, world) for b in traffic.reduced)
        if choice == "sp":
            return reduced + sum(self.all_gather(b * tokens, world) for b in traffic.gathered)
        if traffic.quantized is None:
            raise ValueError("cost model: sp_int8 was asked for, and the graph has no quantised gathers on offer")
        gathered = sum(self.all_gather_quantized(b * tokens, world) for b in traffic.quantized)
        return reduced + gathered

    def choose(self, tokens: float, world: int, traffic: Traffic, allowed: Sequence[Choice] = CHOICES) -> Choice:
        """The cheapest way for `tokens`; on a tie the first of `allowed`, so nothing changes without a gain."""
        offered = [c for c in allowed if c != "sp_int8" or traffic.quantized is not None]
        return min(offered, key=lambda c: self.seconds(c, tokens, world, traffic))

    def ranges(
        self, world: int, traffic: Traffic, allowed: Sequence[Choice] = CHOICES, most: int = MOST_TOKENS
    ) -> tuple[Range, ...]:
        """The choice for every token count from 1 on, neighbours that agree merged."""

        def chosen(tokens: int) -> Choice:
            return self.choose(tokens, world, traffic, allowed)

        # Costs are lines in the token count, all-reduce the lower of two: a grid finds each change, bisection its
        # place.
        grid = sorted({1, most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})
        starts = [(1, chosen(1))]
        for low, high in itertools.pairwise(grid):
            while chosen(high) != starts[-1][1]:
                at = _first_change(chosen, max(low, starts[-1][0]), high)
                starts.append((at, chosen(at)))
        ends = [*(start - 1 for start, _ in starts[1:]), None]
        return tuple(Range(start=s, end=e, choice=c) for (s, c), e in zip(starts, ends, strict=True))

    def threshold(
        self, world: int, traffic: Traffic, allowed: Sequence[Choice] = CHOICES, most: int = MOST_TOKENS
    ) -> int | None:
        """min_tokens="auto": from here on an all-reduce is never the cheapest; None: there is no such place."""
        last = None
        for part in reversed(self.ranges(world, traffic, allowed, most)):
            if part.choice == "all_reduce":
                break
            last = part.start
        return last


def _first_change(chosen: Callable[[int], Choice], low: int, high: int) -> int:
    """The smallest count in (low, high] that is not chosen as `low` is."""
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
    """Three bytes of traffic for each on the whole, and on a shard of eight, at the rate of a copy."""
    return 3 * (1 + 1 / 8) / rate


def _by_nccl(name: str, *, alpha: float, bandwidth: float) -> CostModel:
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
        _by_nccl("pcie", alpha=5.7e-6, bandwidth=20e9),
        # 100 Gbit/s, one port a rank: 12.5 GB/s, which RDMA reaches (msprof, RDMA_BANDWIDTH_V2_1_0).
        _by_nccl("ethernet", alpha=9.6e-6, bandwidth=12.5e9),
    )
}


def table(name: str) -> CostModel:
    if name not in TABLE:
        raise ValueError(f"cost model: no link {name!r} in the table. Has: {', '.join(TABLE)}")
    return TABLE[name]


# ---- measuring
