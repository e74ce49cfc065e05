"""Fused operators, each one contract with a reference and up to three backends.

Shape letters, the same everywhere: T tokens, B sequences, S keys, HQ and HK query and key heads, D head size,
R rotary size, A position axes, C hidden size, F expert size, E experts, K chosen per token.
"""

from ._op import OPS, Op
from .attention import paged_attention, write_kv
from .grouped_matmul import grouped_matmul
from .linear import linear
from .moe import experts, route
from .permute import permute, unpermute
from .qk_norm_rope import qk_norm_rope
from .qk_norm_rope_write import qk_norm_rope_write
from .quant import dequantize, dynamic_quant
from .rms_norm import add_rms_norm, rms_norm
from .rope import merge_mrope, mrope, mrope_, rope, rope_, tokens_first
from .sample import penalize, sample
from .sparse_attention import (
    causal_bounds,
    choose_attention,
    dense_indexer_kl_loss,
    hadamard,
    indexer_kl_loss,
    indexer_rope,
    lightning_indexer,
    masked_attention,
    selection_mask,
    sparse_attention,
)
from .swiglu import swiglu

__all__ = [
    "OPS",
    "Op",
    "add_rms_norm",
    "causal_bounds",
    "choose_attention",
    "dense_indexer_kl_loss",
    "dequantize",
    "dynamic_quant",
    "experts",
    "grouped_matmul",
    "hadamard",
    "indexer_kl_loss",
    "indexer_rope",
    "lightning_indexer",
    "linear",
    "masked_attention",
    "merge_mrope",
    "mrope",
    "mrope_",
    "paged_attention",
    "penalize",
    "permute",
    "qk_norm_rope",
    "qk_norm_rope_write",
    "rms_norm",
    "rope",
    "rope_",
    "route",
    "sample",
    "selection_mask",
    "sparse_attention",
    "swiglu",
    "tokens_first",
    "unpermute",
    "write_kv",
]
