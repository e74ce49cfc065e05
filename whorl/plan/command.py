"""Build the plan that `whorl train --plan` prints from its command-line options."""

from dataclasses import replace

from whorl.plan.hardware import HARDWARE, Cluster, Hardware
from whorl.plan.layout import PlanSettings
from whorl.plan.memory import GB
from whorl.plan.model_shape import read_model
from whorl.plan.options import PlanOptions
from whorl.plan.report import as_dict, render
from whorl.plan.search import Plan, make_plan

__all__ = ["as_dict", "build_plan", "render"]

STATE_BYTES = {"float32": 4, "bfloat16": 2}


def _hardware(options: PlanOptions) -> Hardware:
    """Return the named hardware with the bandwidths and the efficiency that the options override."""
    if options.hardware not in HARDWARE:
        raise ValueError(f"hardware is {options.hardware!r}, expected one of {', '.join(HARDWARE)}")
    hardware = HARDWARE[options.hardware]
    if options.efficiency is not None:
        if not 0 < options.efficiency <= 1:
            raise ValueError(
                f"efficiency is {options.efficiency:g}, expected a share of the peak FLOP/s: over 0 and at most 1"
            )
        hardware = replace(hardware, efficiency=options.efficiency, efficiency_source="given by --efficiency")
    speeds = {"link": options.link, "network": options.network, "host": options.host}
    overrides = {name: value for name, value in speeds.items() if value is not None}
    for name, value in overrides.items():
        if value <= 0:
            raise ValueError(f"{name} is {value:g} GB/s, expected a positive number")
    return replace(hardware, **{name: value * GB for name, value in overrides.items()})  # type: ignore[arg-type]


def build_plan(model: str, cards: int, options: PlanOptions) -> Plan:
    """Return the plan of a model on `cards` cards, with every layout that divides evenly.

    model: a built-in name, a config.json or its folder; options.batch defaults to one sequence for each rank. Raises
    ValueError when an option is out of range, the model is unknown, or no layout divides evenly.

        print(render(build_plan("deepseek-v3.2", 64, PlanOptions(seq=32768)), top=10))
    """
    hardware = _hardware(options)
    memory = hardware.memory if options.memory is None else options.memory
    cluster = Cluster(hardware=hardware, cards=cards, dies=options.dies or hardware.dies, memory=memory)
    if options.states not in STATE_BYTES:
        raise ValueError(f"states is {options.states!r}, expected one of {', '.join(STATE_BYTES)}")
    element_bytes = STATE_BYTES[options.states]
    settings = PlanSettings(
        seq=options.seq,
        batch=options.batch or cluster.ranks,
        imbalance=options.imbalance,
        weight=element_bytes,
        gradient=element_bytes,
        moment=element_bytes,
        checkpoint=options.checkpointing,
        masked=hardware.masked,
    )
    return make_plan(read_model(model), cluster, settings)
