"""Layouts of gloo ranks in tests: the checks of `whorl selftest --ranks`, by workers that are kept for many of them."""

import functools
from typing import Any

import pytest
import torch
from ranks import shared

from whorl.selftest_ranks.compare import TOLERANCE, compare
from whorl.selftest_ranks.layouts import (
    BATCH,
    LENGTH,
    Degrees,
    Result,
    _pipelined,
    _plain,
    _update,
    batch,
    build,
    collect,
    dims,
    fuse,
    install_cpu_shims,
    job,
    merge_ranks,
    one_rank,
    run,
)

__all__ = [
    "BATCH",
    "LENGTH",
    "TIMEOUT",
    "TOLERANCE",
    "Degrees",
    "Result",
    "_pipelined",
    "_plain",
    "_update",
    "batch",
    "build",
    "cases",
    "check",
    "collect",
    "collectives",
    "dims",
    "expected_result",
    "fuse",
    "job",
    "result_of",
]
TIMEOUT = 300  # the first call imports TorchTitan


def alone(micro_batches: int, stage: str, model: tuple[tuple[str, Any], ...]) -> Result:
    install_cpu_shims("cpu")
    return one_rank(micro_batches, stage, **dict(model))


@functools.cache
def expected_result(ranks: int, micro_batches: int = 1, stage: str = "sparse", model: tuple[Any, ...] = ()) -> Result:
    """Of one rank, by a process that has TorchTitan loaded already."""
    return shared(ranks).run(alone, micro_batches, stage, model, timeout=TIMEOUT)[0]


def result_of(ranks: int, layout: Degrees) -> Result:
    """What the ranks have together."""
    return merge_ranks(shared(ranks).run(run, layout, timeout=TIMEOUT), layout)


def check(ranks: int, layout: Degrees) -> None:
    if "V" in layout.schedule and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 lets a rank of a V-shaped schedule send to itself first, where gloo hangs")
    compare(result_of(ranks, layout), expected_result(ranks, 1, layout.stage, layout.model), layout)


def cases(ranks: int, layouts: dict[str, Degrees], *marks: Any) -> list[Any]:
    """For tests that take `ranks` and `layout`."""
    return [pytest.param(ranks, layout, id=f"{name} on {ranks}", marks=marks) for name, layout in layouts.items()]


def collectives(function: Any) -> dict[str, int]:
    """How often each is called by `function`."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        function()
    return {str(op).rsplit(".", 1)[-1]: n for op, n in mode.get_comm_counts().items() if n}
