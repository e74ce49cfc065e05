"""Attention, from the product that gives q, k and v to the one that takes the result.

`qk_norm_rope.py` norms and turns heads (in training too), `qk_norm_rope_write.py` into the cache; `write_kv.py` writes
pages, `paged.py` reads them. `causal.py` is attention in training, with the bits of `paged.py`; `bidirectional.py` that
of a vision tower.
"""

from .bidirectional import packed_attention
from .causal import causal_attention, causal_attention_backward
from .paged import paged_attention
from .qk_norm_rope import qk_norm_rope, qk_norm_rope_backward
from .qk_norm_rope_write import qk_norm_rope_write
from .write_kv import write_kv

__all__ = [
    "causal_attention",
    "causal_attention_backward",
    "packed_attention",
    "paged_attention",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "qk_norm_rope_write",
    "write_kv",
]
