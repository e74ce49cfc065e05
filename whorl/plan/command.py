"""`whorl train --plan`: from what was asked to a plan."""

from dataclasses import replace

from whorl.plan.hardware import HARDWARE, Cluster, Hardware
from whorl.plan.layout import Settings
from whorl.plan.memory import GB
from whorl.plan.model_shape import read_model
from whorl.plan.report import as_dict, render
from whorl.plan.search import Plan, make_plan

__all__ = ["as_dict", "prepare", "render"]

STATES = {"float32": 4, "bfloat16": 2}


def _hardware(name: str, efficiency: float | None, bandwidths: dict[str, float | None]) -> Hardware:
    if name not in HARDWARE:
        raise ValueError(f"hardware is {name!r}: use one of {', '.join(HARDWARE)}")
    found = HARDWARE[name]
    if efficiency is not None:
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency is {efficiency:g}: a share of the peak, over 0 and at most 1")
        found = replace(found, efficiency=efficiency, efficiency_source="as asked")

    def speed(key: str, default: float) -> float:
        value = bandwidths.get(key)
        if value is not None and value <= 0:
            raise ValueError(f"{key} is {value:g} GB/s: it must be positive")
        return default if value is None else value * GB

    return replace(
        found, link=speed("link", found.link), network=speed("network", found.network), host=speed("host", found.host)
    )


def prepare(
    model: str,
    hardware: str,
    *,
    cards: int,
    seq: int,
    dies: int | None = None,
    memory: float | None = None,
    batch: int | None = None,
    imbalance: float = 0.25,
    efficiency: float | None = None,
    states: str = "float32",
    checkpoint: bool = True,
    bandwidths: dict[str, float | None],
) -> Plan:
    """states: of weights, gradients and moments. bandwidths: link, network and host in GB/s.

    None anywhere: the hardware's, or a sequence for each rank.
    """
    found = _hardware(hardware, efficiency, bandwidths)
    cluster = Cluster(
        hardware=found, cards=cards, dies=dies or found.dies, memory=found.memory if memory is None else memory
    )
    if states not in STATES:
        raise ValueError(f"states is {states!r}: use one of {', '.join(STATES)}")
    size = STATES[states]
    settings = Settings(
        seq=seq,
        batch=batch or cluster.ranks,
        imbalance=imbalance,
        weight=size,
        gradient=size,
        moment=size,
        checkpoint=checkpoint,
        masked=found.masked,
    )
    return make_plan(read_model(model), cluster, settings)
