"""`whorl train --plan`: from what was asked to a plan."""

from dataclasses import replace

from whorl.plan.hardware import HARDWARE, Cluster, Hardware
from whorl.plan.layout import PlanSettings
from whorl.plan.memory import GB
from whorl.plan.model_shape import read_model
from whorl.plan.options import PlanOptions
from whorl.plan.report import as_dict, render
from whorl.plan.search import Plan, make_plan

__all__ = ["as_dict", "prepare", "render"]

STATES = {"float32": 4, "bfloat16": 2}


def _hardware(asked: PlanOptions) -> Hardware:
    if asked.hardware not in HARDWARE:
        raise ValueError(f"hardware is {asked.hardware!r}: use one of {', '.join(HARDWARE)}")
    found = HARDWARE[asked.hardware]
    if asked.efficiency is not None:
        if not 0 < asked.efficiency <= 1:
            raise ValueError(f"efficiency is {asked.efficiency:g}: a share of the peak, over 0 and at most 1")
        found = replace(found, efficiency=asked.efficiency, efficiency_source="as asked")
    speeds = {"link": asked.link, "network": asked.network, "host": asked.host}
    given = {name: value for name, value in speeds.items() if value is not None}
    for name, value in given.items():
        if value <= 0:
            raise ValueError(f"{name} is {value:g} GB/s: it must be positive")
    return replace(found, **{name: value * GB for name, value in given.items()})  # type: ignore[arg-type]


def prepare(model: str, cards: int, asked: PlanOptions) -> Plan:
    found = _hardware(asked)
    memory = found.memory if asked.memory is None else asked.memory
    cluster = Cluster(hardware=found, cards=cards, dies=asked.dies or found.dies, memory=memory)
    if asked.states not in STATES:
        raise ValueError(f"states is {asked.states!r}: use one of {', '.join(STATES)}")
    size = STATES[asked.states]
    settings = PlanSettings(
        seq=asked.seq,
        batch=asked.batch or cluster.ranks,
        imbalance=asked.imbalance,
        weight=size,
        gradient=size,
        moment=size,
        checkpoint=asked.checkpointing,
        masked=found.masked,
    )
    return make_plan(read_model(model), cluster, settings)
