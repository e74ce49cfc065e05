"""Latent attention (MLA) over a paged cache, and the indexer that selects its keys: DeepSeek-V3 and -V3.2 inference.

`heads.py` is a linear layer with one weight per head; `write.py` and `index_write.py` write to the paged caches,
`indexer.py` selects keys from them and `attention.py` attends to those. `pages.py` has the code that they share for
paged caches, `codes.py` the format of 8-bit caches. The kernels are in the files with `_triton` and `_torch_npu`.

A latent is the N channels that a token stores for all heads, DeepSeek's compressed KV. Queries are absorbed: multiplied
by the weight that would expand latents to keys, so that they are compared with latents directly. R rotary channels, the
part of the key that is rotated, follow the latent, or lie in a cache of their own, `rotary_cache`, as Ascend needs.
"""

from .attention import latent_attention as latent_attention
from .heads import head_linear as head_linear
from .index_write import index_write as index_write
from .indexer import paged_indexer as paged_indexer
from .write import latent_write as latent_write
