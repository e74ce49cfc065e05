"""Sequence parallelism for models that torch.compile captures: the graph passes that rewrite sums over ranks.

It is this one thing and no framework for passes of other kinds. Start reading at `pipeline.PIPELINE`;
`capture.compile` is the front door, `rewrite` the passes alone.
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
    """torch.compile(model, options=inductor_options(config)): the passes inside torch's own Inductor, for one graph."""
    from .inductor import inductor_options as options  # Inductor takes seconds to import

    return options(config)
