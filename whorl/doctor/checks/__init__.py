"""The files of checks, in the order in which their findings are printed. A new file must be listed here."""

from whorl.doctor.checks import (
    branch,
    engines,
    invariance,
    model,
    operator,
    parallel,
    quantised,
    sections,
    sizes,
    table,
    trainers,
)

__all__ = [
    "branch",
    "engines",
    "invariance",
    "model",
    "operator",
    "parallel",
    "quantised",
    "sections",
    "sizes",
    "table",
    "trainers",
]
