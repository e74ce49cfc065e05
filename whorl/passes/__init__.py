"""Sequence parallelism for models that torch.compile captures: graph passes that rewrite sums over ranks.

This package does this one thing; it is not a framework for other graph passes. `compile` is the entry point for users,
`rewrite` runs the passes on a graph you captured yourself, and `pipeline.PIPELINE` lists the passes in order: start
reading there.
"""

from typing import Any

from whorl.collectives import (
    all_gather,
    all_gather_quantized,
    local_rows,
    ordered_all_reduce,
    ordered_reduce_scatter,
)

from .capture import Compiled, compile
from .config import SequenceParallel
from .layout import Layout
from .pipeline import PIPELINE, order_sums, rewrite
from .report import Report
from .rows import register_row_wise

__all__ = [
    "PIPELINE",
    "Compiled",
    "Layout",
    "Report",
    "SequenceParallel",
    "all_gather",
    "all_gather_quantized",
    "compile",
    "inductor_options",
    "local_rows",
    "order_sums",
    "ordered_all_reduce",
    "ordered_reduce_scatter",
    "register_row_wise",
    "rewrite",
]


def inductor_options(config: SequenceParallel) -> dict[str, Any]:
    """Return the options that run the passes inside torch's own Inductor, on one graph per capture.

    config: `min_tokens` must be a number; returns a dict for torch.compile's `options`; raises ValueError when
    `config.min_tokens` is "auto". Example: torch.compile(model, options=inductor_options(config)).
    """
    from .inductor import inductor_options as options  # Inductor takes seconds to import

    return options(config)
