"""Latent attention (MLA) over a paged cache, and the indexer that chooses its keys: DeepSeek-V3 and -V3.2 in an engine.

`heads.py` multiplies every head by a weight of its own, `write.py` and `index_write.py` write pages, `indexer.py`
chooses keys in them and `attention.py` reads those; `pages.py` is what they know of pages, `codes.py` how those
are kept in 8 bits. Beside each lies its kernel.
"""

from .attention import latent_attention
from .heads import head_linear
from .index_write import index_write
from .indexer import paged_indexer
from .write import latent_write

__all__ = ["head_linear", "index_write", "latent_attention", "latent_write", "paged_indexer"]
