"""Attention operators, from the qkv projection's output to the input of the output projection.

`qk_norm_rope.py` normalises and rotates heads (in training too); `qk_norm_rope_write.py` also writes them into the KV
cache. `write_kv.py` writes the paged cache and `paged.py` attends over it. `causal.py` is attention in training, with
bits equal to those of `paged.py`; `bidirectional.py` is the attention of a vision tower. `cuts_triton.py` has the
arithmetic that the Triton kernels share.
"""

from .bidirectional import packed_attention as packed_attention
from .bidirectional import packed_attention_backward as packed_attention_backward
from .causal import causal_attention as causal_attention
from .causal import causal_attention_backward as causal_attention_backward
from .paged import paged_attention as paged_attention
from .qk_norm_rope import qk_norm_rope as qk_norm_rope
from .qk_norm_rope import qk_norm_rope_backward as qk_norm_rope_backward
from .qk_norm_rope_write import qk_norm_rope_write as qk_norm_rope_write
from .write_kv import write_kv as write_kv
