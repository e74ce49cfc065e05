"""The files of checks, in the order in which their findings are printed. A new file must be listed here."""

from whorl.doctor.checks import branch, model, operator, parallel, quantised, sections, sizes, table

__all__ = ["branch", "model", "operator", "parallel", "quantised", "sections", "sizes", "table"]
