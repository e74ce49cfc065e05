"""The lightning indexer of DeepSeek sparse attention: its scores, its selection of keys, and its training loss.

To select keys: `scores.py` scores them, `top_k.py` takes the highest, and `lightning.py` does both in chunks. To train
the indexer: `kl.py` has the target, the loss with its gradients, and both in one operator, over the selected or all
visible keys, and `loss.py` adds autograd. `hadamard.py` is a transform before quantisation; `bounds.py` says which keys
a query sees.
"""

from . import cases as cases
from . import kl_cases as kl_cases
from .bounds import causal_bounds as causal_bounds
from .hadamard import hadamard as hadamard
from .kl import indexer_kl as indexer_kl
from .kl import indexer_kl_gradients as indexer_kl_gradients
from .kl import indexer_target as indexer_target
from .lightning import lightning_indexer as lightning_indexer
from .loss import indexer_kl_loss as indexer_kl_loss
from .scores import index_scores as index_scores
from .scores import indexer_rope as indexer_rope
from .top_k import top_k as top_k
