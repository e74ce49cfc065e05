"""torch_npu's operators, with their own names and signatures, on any device.

Code written for Ascend runs through these functions on a CPU or an NVIDIA GPU, computed by `whorl.ops`; with tensors on
an NPU they call torch_npu itself, without checks of their own. Parameters, outputs and aliasing are those of torch_npu
2.13. Where torch_npu drops a gradient or has none, these functions raise RuntimeError. Off the NPU a call that breaks a
documented device limit raises ValueError, unless `limits("ignore")` is set. See docs/ascend.md.
"""

from .attention import npu_fused_infer_attention_score
from .calling import limits
from .gating import npu_moe_gating_top_k, npu_moe_gating_top_k_softmax
from .indexer import (
    npu_dense_lightning_indexer_grad_kl_loss,
    npu_dense_lightning_indexer_softmax_lse,
    npu_lightning_indexer,
    npu_sparse_lightning_indexer_grad_kl_loss,
)
from .matmul import npu_grouped_matmul
from .moe import (
    npu_moe_finalize_routing,
    npu_moe_init_routing_v2,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)
from .norms import npu_add_rms_norm, npu_rms_norm, npu_swiglu
from .quant import npu_dynamic_quant
from .rotary import (
    _npu_rotary_embedding,
    npu_apply_rotary_pos_emb,
    npu_interleave_rope,
    npu_mrope,
    npu_rotary_mul,
    npu_rotary_position_embedding,
)
from .sparse import npu_sparse_flash_attention, npu_sparse_flash_attention_grad

__all__ = [
    "_npu_rotary_embedding",
    "limits",
    "npu_add_rms_norm",
    "npu_apply_rotary_pos_emb",
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_dynamic_quant",
    "npu_fused_infer_attention_score",
    "npu_grouped_matmul",
    "npu_interleave_rope",
    "npu_lightning_indexer",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_mrope",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_rotary_position_embedding",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_swiglu",
]
