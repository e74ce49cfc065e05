"""The lightning indexer of DeepSeek sparse attention: its scores, its selection of keys, and its training loss.

To select keys: `scores.py` scores them, `top_k.py` takes the highest, and `lightning.py` does both in chunks. To train
the indexer: `kl.py` has the target, the loss with its gradients, and both in one operator, over the selected or all
visible keys, and `loss.py` adds autograd. `hadamard.py` is a transform before quantisation; `bounds.py` says which keys
a query sees.
"""

from . import cases, kl_cases
from .bounds import causal_bounds
from .hadamard import hadamard
from .kl import indexer_kl, indexer_kl_gradients, indexer_target
from .lightning import lightning_indexer
from .loss import indexer_kl_loss
from .scores import index_scores, indexer_rope
from .top_k import top_k

__all__ = [
    "cases",
    "causal_bounds",
    "hadamard",
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
