"""Rotary position embedding (RoPE) of queries and keys.

`contract.py` has the operators, which backend takes which arguments and the cases of tests and benchmarks, `tables.py`
the cos/sin tables, `triton.py` and `torch_npu.py` the kernels.
"""

from .contract import rope as rope
from .contract import rope_ as rope_
from .tables import merge_mrope as merge_mrope
from .tables import mrope_axes as mrope_axes
from .tables import table_dtype as table_dtype
from .tables import tokens_first as tokens_first
