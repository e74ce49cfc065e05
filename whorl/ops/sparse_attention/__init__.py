"""Attention over the keys that an indexer selected, in two forms with the same result.

`contract.py` defines `sparse_attention`, which gathers the listed keys of absorbed MLA, for long sequences. `masked.py`
defines `masked_attention`, which computes ordinary heads under a bit mask, for short ones, and `choose_attention`,
which says which of the two is faster. `launch.py` chooses the kernels of the former.
"""

from . import cases as cases
from .contract import sparse_attention as sparse_attention
from .contract import sparse_attention_backward as sparse_attention_backward
from .masked import choose_attention as choose_attention
from .masked import masked_attention as masked_attention
from .masked import masked_attention_backward as masked_attention_backward
from .masked import selection_mask as selection_mask
