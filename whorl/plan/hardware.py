"""What a plan is made for: cards by what one rank has of them, and how many there are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One rank's share; bytes and FLOPs per second."""

    name: str
    dies: int  # of a card
    memory: float  # GB of a die
    flops: float
    memory_bandwidth: float
    link: float  # to the ranks of its domain
    domain: int  # ranks that reach each other at that speed
    network: float  # to all others
    host: float  # to the host's memory, each way
    efficiency: float  # share of `flops` that a layer reaches
    efficiency_source: str
    masked: bool = True  # see `Settings`


A3 = Hardware(
    name="a3",
    dies=2,
    memory=64,
    flops=376e12,
    memory_bandwidth=1.6e12,
    link=196e9,
    domain=768,
    network=25e9,
    host=50e9,
    efficiency=0.066,
    efficiency_source="published run of 8 layers of DeepSeek-V3.2 with 8 experts at 4096 tokens: 400 tokens/s, "
    "taken as one die; its 4-layer run, 568 tokens/s, gives 0.051",
    masked=False,
)
H200 = Hardware(
    name="h200",
    dies=1,
    memory=141,
    flops=989e12,
    memory_bandwidth=4.3e12,
    link=450e9,
    domain=8,
    network=50e9,
    host=50e9,
    efficiency=0.35,
    efficiency_source="assumed, not measured",
)
HARDWARE = {h.name: h for h in (A3, H200)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    hardware: Hardware
    cards: int
    dies: int = 1
    memory: float  # GB of a die

    @property
    def ranks(self) -> int:
        return self.cards * self.dies

    @property
    def total(self) -> float:
        return self.ranks * self.memory
