"""Attention over selected keys: `contract.py` and `masked.py` say what it is, `launch.py` which kernels run."""

from . import cases
from .contract import sparse_attention, sparse_attention_backward
from .hadamard import hadamard, hadamard_backward
from .indexer import causal_bounds, index_scores, indexer_rope, lightning_indexer, top_k
from .kl import dense_indexer_kl, dense_indexer_target, indexer_kl, indexer_target
from .kl_gradients import dense_indexer_kl_gradients, indexer_kl_gradients
from .loss import dense_indexer_kl_loss, indexer_kl_loss
from .masked import choose_attention, masked_attention, masked_attention_backward, selection_mask

__all__ = [
    "cases",
    "causal_bounds",
    "choose_attention",
    "dense_indexer_kl",
    "dense_indexer_kl_gradients",
    "dense_indexer_kl_loss",
    "dense_indexer_target",
    "hadamard",
    "hadamard_backward",
    "index_scores",
    "indexer_kl",
    "indexer_kl_gradients",
    "indexer_kl_loss",
    "indexer_rope",
    "indexer_target",
    "lightning_indexer",
    "masked_attention",
    "masked_attention_backward",
    "selection_mask",
    "sparse_attention",
    "sparse_attention_backward",
    "top_k",
]
