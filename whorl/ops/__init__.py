"""Fused operators. Each operator has one contract, one reference in plain torch, and kernels for several backends.

    from whorl import ops

    y = ops.rms_norm(x, weight)                      # the first backend, in order of priority, that takes the arguments
    y = ops.rms_norm(x, weight, backend="torch")     # the reference
    ops.rms_norm.choose(x, weight)                   # which backend runs, and why the others do not

`register_backend` adds a backend from another package. Shape letters mean the same in every docstring unless it says
otherwise: T tokens, B sequences, S keys, MB blocks in a row of a block table, HQ and HK query and key heads, HI heads
of the indexer, D head size, DV size of a value head, R rotary size, N channels of a latent, A position axes, P rows of
a cos/sin table, C hidden size, F intermediate size of a gated MLP, V vocabulary size, E experts, K experts or selected
keys per token. In matrix products x is [T, K] and the weight [N, K], as in torch.nn.Linear.
"""

from types import ModuleType as _ModuleType

from whorl.device import register_backend as register_backend

from ._op import OPS as OPS
from ._op import Op as Op
from .attention import causal_attention as causal_attention
from .attention import packed_attention as packed_attention
from .attention import paged_attention as paged_attention
from .attention import qk_norm_rope as qk_norm_rope
from .attention import qk_norm_rope_write as qk_norm_rope_write
from .attention import write_kv as write_kv
from .gated_add import gated_add as gated_add
from .gated_delta import causal_conv as causal_conv
from .gated_delta import causal_conv_lanes as causal_conv_lanes
from .gated_delta import delta_gates as delta_gates
from .gated_delta import delta_tensors as delta_tensors
from .gated_delta import gated_delta as gated_delta
from .gated_delta import gated_delta_lanes as gated_delta_lanes
from .gated_delta import gated_delta_step as gated_delta_step
from .gated_delta import gated_rms_norm as gated_rms_norm
from .gated_delta import l2_norm as l2_norm
from .glu import glu as glu
from .indexer import causal_bounds as causal_bounds
from .indexer import hadamard as hadamard
from .indexer import index_scores as index_scores
from .indexer import indexer_kl_loss as indexer_kl_loss
from .indexer import indexer_rope as indexer_rope
from .indexer import lightning_indexer as lightning_indexer
from .indexer import top_k as top_k
from .latent import head_linear as head_linear
from .latent import index_write as index_write
from .latent import latent_attention as latent_attention
from .latent import latent_write as latent_write
from .latent import paged_indexer as paged_indexer
from .linear import linear as linear
from .log_softmax import log_softmax as log_softmax
from .log_softmax import token_logprobs as token_logprobs
from .low_rank import low_rank as low_rank
from .moe import clipped_experts as clipped_experts
from .moe import experts as experts
from .moe import grouped_matmul as grouped_matmul
from .moe import permute as permute
from .moe import route as route
from .moe import unpermute as unpermute
from .norm_linear import norm_linear as norm_linear
from .output_gate import output_gate as output_gate
from .quant import dequantize as dequantize
from .quant import dynamic_quant as dynamic_quant
from .quantised import int8_experts as int8_experts
from .quantised import int8_linear as int8_linear
from .quantised import packed_experts as packed_experts
from .quantised import packed_linear as packed_linear
from .rms_norm import add_rms_norm as add_rms_norm
from .rms_norm import rms_norm as rms_norm
from .rope import merge_mrope as merge_mrope
from .rope import rope as rope
from .rope import rope_ as rope_
from .rope import tokens_first as tokens_first
from .sample import penalize as penalize
from .sample import sample as sample
from .sparse_attention import choose_attention as choose_attention
from .sparse_attention import masked_attention as masked_attention
from .sparse_attention import selection_mask as selection_mask
from .sparse_attention import sparse_attention as sparse_attention

# The public names are those imported above, without the modules that they come from.
__all__ = sorted(name for name, value in vars().items() if name[0] != "_" and not isinstance(value, _ModuleType))
