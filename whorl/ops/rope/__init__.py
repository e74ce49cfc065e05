"""Rotary position embedding (RoPE) of queries and keys.

`contract.py` has the operators and their references, `tables.py` the cos/sin tables, `triton.py` and `torch_npu.py` the
kernels, `backends.py` which kernel takes which arguments, and `cases.py` the cases of tests and benchmarks.
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
