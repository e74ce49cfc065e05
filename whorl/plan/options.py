"""What `whorl train --plan` takes. No torch here."""

from dataclasses import dataclass

from whorl.fields import option

PLAN = "With --plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """None is "the hardware's", or what the text says."""

    plan: str | None = option(
        None, "Say which layouts fit: deepseek-v3.2, a config.json or its folder.", panel=PLAN, metavar="MODEL"
    )
    cards: int | None = option(None, "Cards of the cluster.", panel=PLAN, least=1)
    dies: int | None = option(None, "Dies of a card; each is a rank. Default: the hardware's.", panel=PLAN, least=1)
    memory: float | None = option(None, "Memory of a die, in GB. Default: the hardware's.", panel=PLAN)
    seq: int = option(4096, "Tokens of a sequence.", panel=PLAN, least=1)
    batch: int | None = option(None, "Sequences of a step. Default: one for each rank.", panel=PLAN, least=1)
    hardware: str = option("a3", "a3 or h200.", panel=PLAN)
    efficiency: float | None = option(None, "Share of the peak FLOP/s that a layer reaches.", panel=PLAN)
    link: float | None = option(None, "GB/s to the ranks nearby.", panel=PLAN)
    network: float | None = option(None, "GB/s to all others.", panel=PLAN)
    host: float | None = option(None, "GB/s to the host's memory, each way.", panel=PLAN)
    imbalance: float = option(0.25, "How much the load of an expert varies, of its mean.", panel=PLAN, least=0)
    states: str = option("float32", "Of weights, gradients and moments: float32 or bfloat16.", panel=PLAN)
    checkpointing: bool = option(
        True, "A layer keeps its input alone for backward.", "--checkpointing/--no-checkpointing", panel=PLAN
    )
    top: int = option(10, "Rows of a table.", panel=PLAN, least=1)
