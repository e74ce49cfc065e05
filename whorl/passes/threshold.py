"""From how many tokens on the rewritten graph runs."""

from typing import Any

from . import agree
from .config import SequenceParallel
from .report import Report

NEVER = 1 << 62  # more tokens than there are


def least_tokens(config: SequenceParallel, report: Report) -> int:
    """min_tokens, or where the cost model says that the rewritten graph is the faster one."""
    is_auto = config.min_tokens == "auto"
    if config.cost is None and not is_auto:
        return int(config.min_tokens)
    model = config.cost or cost_here(report.group)
    traffic = _traffic(report)
    way: Any = "sp_int8" if report.is_quantized else "sp"
    at = report.tokens or 1
    plain, new = (model.seconds(c, at, report.size, traffic) for c in ("all_reduce", way))
    report.predicted_gain = plain / new if new else None
    if not is_auto:
        return int(config.min_tokens)
    found = model.threshold(report.size, traffic, ("all_reduce", way))
    return NEVER if found is None else found


def _traffic(report: Report) -> Any:
    """Bytes a token of what was rewritten, and of what came in its place."""
    from .cost import Traffic

    reduced, own = (
        tuple(float(c.row_bytes) for c in report.collectives if c.rewritten and c.kind == kind)
        for kind in ("all_reduce", "all_gather")
    )
    gathered = tuple(float(g.row_bytes) for g in report.gathers)
    return Traffic(reduced=reduced, gathered=gathered, quantized=gathered if report.is_quantized else None, own=own)


def cost_here(group: str) -> Any:
    from .cost import table
    from .measure_cost import measure

    return table("h200_nvlink") if agree.is_alone(group) else measure(group)
