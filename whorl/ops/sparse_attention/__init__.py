"""Attention over selected keys: `contract.py` says what it is, `launch.py` which kernels run, `cases.py` its sizes."""

from . import cases
from .contract import sparse_attention, sparse_attention_backward

__all__ = ["cases", "sparse_attention", "sparse_attention_backward"]
