"""The lightning indexer of DeepSeek sparse attention: its scores, its selection of keys, and its training loss.

To select keys: `scores.py` scores them, `top_k.py` takes the highest, and `lightning.py` does both in chunks. To train
the indexer: `kl.py` and `dense_kl.py` have the loss over the selected and over all visible keys in two operators each,
first the target and then the loss with its gradients; `kl_gradients.py` combines the two, and `loss.py` adds autograd.
`hadamard.py` is a transform before quantisation; `bounds.py` says which keys a query sees.
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
