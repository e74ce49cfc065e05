"""Fused operators, each one contract with a reference and up to three backends.

Shape letters, the same everywhere: T tokens, B sequences, S keys, HQ and HK query and key heads, D head size,
R rotary size, A position axes, C hidden size, F expert size, E experts, K chosen per token.
"""

from ._op import OPS, Op
from .qk_norm_rope import qk_norm_rope
from .rms_norm import add_rms_norm, rms_norm
from .rope import merge_mrope, mrope, mrope_, rope, rope_, tokens_first
from .swiglu import swiglu

__all__ = [
    "OPS",
    "Op",
    "add_rms_norm",
    "merge_mrope",
    "mrope",
    "mrope_",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_",
    "swiglu",
    "tokens_first",
]
