"""Rotary position embedding (RoPE) of queries and keys.

`contract.py` has the operators, which backend takes which arguments and the cases of tests and benchmarks, `tables.py`
the cos/sin tables, `triton.py` and `torch_npu.py` the kernels.
"""

from .contract import rope, rope_
from .tables import merge_mrope, mrope_axes, table_dtype, tokens_first

__all__ = ["merge_mrope", "mrope_axes", "rope", "rope_", "table_dtype", "tokens_first"]
