"""Find the number of tokens from which the rewritten graph runs."""

from typing import Any

from . import agree
from .config import SequenceParallel
from .report import Report

NEVER = 1 << 62  # more tokens than any call has


def least_tokens(config: SequenceParallel, report: Report) -> int:
    """Return `config.min_tokens`; for "auto" the count from which the cost model predicts a gain, or NEVER.

    Where a cost model is used, `report.predicted_gain` is set as well.
    """
    is_auto = config.min_tokens == "auto"
    if config.cost is None and not is_auto:
        return int(config.min_tokens)
    model = config.cost or local_cost_model(report.group)
    traffic = _traffic(report)
    report.predicted_gain, threshold = model.gain(report.tokens or 1, report.size, traffic)
    if not is_auto:
        return int(config.min_tokens)
    return NEVER if threshold is None else threshold


def _traffic(report: Report) -> Any:
    """Return the bytes per token of the collectives that were rewritten, and of the gathers in their place."""
    from .cost import Traffic

    reduced, model_gathers = (
        tuple(float(c.row_bytes) for c in report.collectives if c.rewritten and c.kind == kind)
        for kind in ("all_reduce", "all_gather")
    )
    gathered = tuple(float(g.row_bytes) for g in report.gathers)
    return Traffic(
        reduced=reduced,
        gathered=gathered,
        quantized=gathered if report.is_quantized else None,
        model_gathers=model_gathers,
    )


def local_cost_model(group: str) -> Any:
    """Return the cost model measured between these ranks; where there is only one, the table's for NVLink."""
    from .cost import table
    from .measure_cost import measure

    return table("h200_nvlink") if agree.is_alone(group) else measure(group)
