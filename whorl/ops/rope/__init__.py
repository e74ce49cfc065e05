"""Rotary embedding: `contract.py` says what it is, `tables.py` by which angles.

`triton.py` and `torch_npu.py` are how it runs, `cases.py` its sizes.
"""

from . import backends, cases
from .contract import mrope, mrope_, mrope_backward, rope, rope_, rope_backward
from .tables import merge_mrope, mrope_axes, table_dtype, tokens_first

__all__ = [
    "backends",
    "cases",
    "merge_mrope",
    "mrope",
    "mrope_",
    "mrope_axes",
    "mrope_backward",
    "rope",
    "rope_",
    "rope_backward",
    "table_dtype",
    "tokens_first",
]
