"""torch_npu's operators, with their own names and signatures, on any device.

Code written for Ascend runs through these functions on a CPU or an NVIDIA GPU, computed by `whorl.ops`; with tensors on
an NPU they call torch_npu itself, without checks of their own. Parameters, outputs and aliasing are those of torch_npu
2.13. Where torch_npu drops a gradient or has none, these functions raise RuntimeError. Off the NPU a call that breaks a
documented device limit raises ValueError, unless `limits("ignore")` is set. See docs/ascend.md.
"""

from .attention import npu_fused_infer_attention_score as npu_fused_infer_attention_score
from .calling import limits as limits
from .gated_delta import npu_chunk_gated_delta_rule as npu_chunk_gated_delta_rule
from .gated_delta import npu_fused_causal_conv1d as npu_fused_causal_conv1d
from .gated_delta import npu_recurrent_gated_delta_rule as npu_recurrent_gated_delta_rule
from .gating import npu_moe_gating_top_k as npu_moe_gating_top_k
from .gating import npu_moe_gating_top_k_softmax as npu_moe_gating_top_k_softmax
from .indexer import npu_dense_lightning_indexer_grad_kl_loss as npu_dense_lightning_indexer_grad_kl_loss
from .indexer import npu_dense_lightning_indexer_softmax_lse as npu_dense_lightning_indexer_softmax_lse
from .indexer import npu_lightning_indexer as npu_lightning_indexer
from .indexer import npu_sparse_lightning_indexer_grad_kl_loss as npu_sparse_lightning_indexer_grad_kl_loss
from .matmul import npu_grouped_matmul as npu_grouped_matmul
from .moe import npu_moe_finalize_routing as npu_moe_finalize_routing
from .moe import npu_moe_init_routing_v2 as npu_moe_init_routing_v2
from .moe import npu_moe_token_permute as npu_moe_token_permute
from .moe import npu_moe_token_unpermute as npu_moe_token_unpermute
from .norms import npu_add_rms_norm as npu_add_rms_norm
from .norms import npu_rms_norm as npu_rms_norm
from .norms import npu_swiglu as npu_swiglu
from .quant import npu_dynamic_quant as npu_dynamic_quant
from .rotary import _npu_rotary_embedding as _npu_rotary_embedding
from .rotary import npu_apply_rotary_pos_emb as npu_apply_rotary_pos_emb
from .rotary import npu_interleave_rope as npu_interleave_rope
from .rotary import npu_mrope as npu_mrope
from .rotary import npu_rotary_mul as npu_rotary_mul
from .rotary import npu_rotary_position_embedding as npu_rotary_position_embedding
from .sparse import npu_sparse_flash_attention as npu_sparse_flash_attention
from .sparse import npu_sparse_flash_attention_grad as npu_sparse_flash_attention_grad

__all__ = sorted(["limits", *(name for name in vars() if "npu_" in name)])
