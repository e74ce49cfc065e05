"""The options of `whorl train --plan` and `whorl plan`. This module does not import torch."""

from dataclasses import dataclass

from whorl.fields import option

PLAN = "With --plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options of a plan. None stands for the value of the hardware, or for what the help text says."""

    plan: str | None = option(
        None, "List the layouts that fit: deepseek-v3.2, a config.json or its folder.", panel=PLAN, metavar="MODEL"
    )
    cards: int | None = option(None, "Number of cards in the cluster.", panel=PLAN, least=1)
    dies: int | None = option(None, "Dies per card; each is a rank. Default: the hardware's.", panel=PLAN, least=1)
    memory: float | None = option(None, "Memory of a die, in GB. Default: the hardware's.", panel=PLAN)
    seq: int = option(4096, "Tokens per sequence.", panel=PLAN, least=1)
    batch: int | None = option(None, "Sequences per step. Default: one for each rank.", panel=PLAN, least=1)
    hardware: str = option("a3", "Accelerator: a3 or h200.", panel=PLAN)
    efficiency: float | None = option(None, "Share of the peak FLOP/s that a layer reaches.", panel=PLAN)
    link: float | None = option(None, "Bandwidth to the ranks of the same domain (node), in GB/s.", panel=PLAN)
    network: float | None = option(None, "Bandwidth to the ranks of other domains, in GB/s.", panel=PLAN)
    host: float | None = option(None, "Bandwidth to host memory, each way, in GB/s.", panel=PLAN)
    imbalance: float = option(
        0.25, "Standard deviation of an expert's load, as a share of its mean.", panel=PLAN, least=0
    )
    states: str = option("float32", "Dtype of weights, gradients and moments: float32 or bfloat16.", panel=PLAN)
    checkpointing: bool = option(
        True, "Use full activation checkpointing.", "--checkpointing/--no-checkpointing", panel=PLAN
    )
    top: int = option(10, "Rows of each table.", panel=PLAN, least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOptions:
    """Options of `whorl plan`."""

    serve: str | None = option(None, "The model: deepseek-v3.2, a config.json or its folder.", metavar="MODEL")
    cards: int | None = option(None, "Number of cards in the cluster.", least=1)
    kind: str = option("H200", "Kind of card: H200 or 910C.")
    seq: int = option(4096, "Tokens of a request that are in the cache while it decodes.", least=1)
    batch: int = option(64, "Requests of an engine that decode at once; fewer where the cache is full.", least=1)
    weights: str = option("bf16", "Format of the layers' weights: bf16, fp8, int8 or int4.")
    kv: str = option("bf16", "Format of the KV cache: bf16 or fp8.")
    top: int = option(10, "Rows of the table.", least=1)
