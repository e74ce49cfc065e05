"""Attention over the keys that an indexer selected, in two forms with the same result.

`contract.py` defines `sparse_attention`, which gathers the listed keys of absorbed MLA, for long sequences. `masked.py`
defines `masked_attention`, which computes ordinary heads under a bit mask, for short ones, and `choose_attention`,
which says which of the two is faster. `launch.py` chooses the kernels of the former.
"""

from . import cases
from .contract import sparse_attention, sparse_attention_backward
from .masked import choose_attention, masked_attention, masked_attention_backward, selection_mask

__all__ = [
    "cases",
    "choose_attention",
    "masked_attention",
    "masked_attention_backward",
    "selection_mask",
    "sparse_attention",
    "sparse_attention_backward",
]
