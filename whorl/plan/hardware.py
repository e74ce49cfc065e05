"""The hardware a plan is made for: what one rank (one die of a card) has, and how many cards the cluster has."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What one rank has, in bytes per second and FLOPs per second."""

    name: str
    dies: int  # dies of a card; each is a rank
    memory: float  # GB of a die
    flops: float  # peak, dense bf16
    memory_bandwidth: float
    link: float  # bandwidth to the ranks of the same domain
    domain: int  # how many ranks reach each other at the speed of `link`: a node or a supernode
    network: float  # bandwidth to the ranks of other domains
    host: float  # bandwidth to host memory, each way
    efficiency: float  # the share of `flops` that a layer reaches
    efficiency_source: str
    masked: bool = True  # whether there is a kernel for masked attention; see `PlanSettings.masked`


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
    """A number of equal cards."""

    hardware: Hardware
    cards: int
    dies: int = 1
    memory: float  # GB of a die

    @property
    def ranks(self) -> int:
        return self.cards * self.dies

    @property
    def total(self) -> float:
        """Return the memory of all ranks, in GB."""
        return self.ranks * self.memory
