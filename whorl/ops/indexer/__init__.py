"""The lightning indexer of DeepSeek sparse attention: its scores, its selection of keys, and its training loss.

`scores.py`, `top_k.py` and `lightning.py` select keys; `kl.py` and `dense_kl.py` are the loss over the selected and
over all visible keys, `kl_gradients.py` computes it directly from the main attention, `loss.py` adds autograd.
"""

from . import cases, kl_cases
from .bounds import causal_bounds
from .dense_kl import dense_indexer_kl, dense_indexer_target
from .hadamard import hadamard, hadamard_backward
from .kl import indexer_kl, indexer_target
from .kl_gradients import dense_indexer_kl_gradients, indexer_kl_gradients
from .lightning import lightning_indexer
from .loss import dense_indexer_kl_loss, indexer_kl_loss
from .scores import index_scores, indexer_rope
from .top_k import top_k

__all__ = [
    "cases",
    "causal_bounds",
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
    "kl_cases",
    "lightning_indexer",
    "top_k",
]
