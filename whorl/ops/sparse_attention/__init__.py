"""Attention over selected keys: `contract.py` and `masked.py` define it, `launch.py` chooses the kernels."""

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
