"""Fused operators, each one contract with a reference and up to three backends.

Shape letters, the same everywhere: T tokens, B sequences, S keys, HQ and HK query and key heads, D head size,
R rotary size, A position axes, C hidden size, F expert size, E experts, K chosen per token.
"""

from ._op import OPS, Op
from .attention import paged_attention, write_kv
from .linear import linear
from .moe import experts, route
from .qk_norm_rope import qk_norm_rope
from .quant import dequantize, dynamic_quant
from .rms_norm import add_rms_norm, rms_norm
from .rope import merge_mrope, mrope, mrope_, rope, rope_, tokens_first
from .sample import penalize, sample
from .swiglu import swiglu

__all__ = [
    "OPS",
    "Op",
    "add_rms_norm",
    "dequantize",
    "dynamic_quant",
    "experts",
    "linear",
    "merge_mrope",
    "mrope",
    "mrope_",
    "paged_attention",
    "penalize",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_",
    "route",
    "sample",
    "swiglu",
    "tokens_first",
    "write_kv",
]
