"""Signatures and documented limits of the Ascend operators, by version: plain data and pure functions, without torch.

`CONTRACTS` holds the signatures of torch_npu 2.13 (and one of MindSpeed). `<operator>_limit` takes the shapes, dtypes
and options of a call and returns the documented device limit that the call breaks, in words, or None.
`schema_arguments` reads the signatures of an installed torch_npu, and `check_installed` checks its version. The limits
are those documented for Atlas A2 and A3; the date in each docstring is that of the vendor's page (docs/zh/custom_APIs
of op-plugin, read in November 2026). `whorl.ops`, `whorl.ascend` and the doctor all use this package.
"""

from types import ModuleType as _ModuleType

from .attention import MASK_SIZE as MASK_SIZE
from .attention import PAGE_SIZES as PAGE_SIZES
from .attention import antiquant_limit as antiquant_limit
from .attention import fused_infer_attention_limit as fused_infer_attention_limit
from .attention import fusion_attention_limit as fusion_attention_limit
from .attention import scatter_nd_update_limit as scatter_nd_update_limit
from .attention import scatter_pa_kv_cache_limit as scatter_pa_kv_cache_limit
from .attention import top_k_top_p_limit as top_k_top_p_limit
from .contract import REQUIRED as REQUIRED
from .contract import Contract as Contract
from .contract import Parameter as Parameter
from .contract import parse_schema as parse_schema
from .gated_delta import chunk_gated_delta_rule_limit as chunk_gated_delta_rule_limit
from .gated_delta import fused_causal_conv1d_limit as fused_causal_conv1d_limit
from .gated_delta import recurrent_gated_delta_rule_limit as recurrent_gated_delta_rule_limit
from .matmul import all_gather_mm_limit as all_gather_mm_limit
from .matmul import grouped_matmul_limit as grouped_matmul_limit
from .matmul import linear_limit as linear_limit
from .matmul import mm_all_reduce_limit as mm_all_reduce_limit
from .matmul import mm_reduce_scatter_limit as mm_reduce_scatter_limit
from .matmul import transpose_batchmatmul_limit as transpose_batchmatmul_limit
from .moe import moe_finalize_routing_limit as moe_finalize_routing_limit
from .moe import moe_gating_top_k_limit as moe_gating_top_k_limit
from .moe import moe_gating_top_k_softmax_limit as moe_gating_top_k_softmax_limit
from .moe import moe_init_routing_limit as moe_init_routing_limit
from .moe import moe_token_permute_limit as moe_token_permute_limit
from .quant_matmul import antiquant_grouped_matmul_limit as antiquant_grouped_matmul_limit
from .quant_matmul import quant_grouped_matmul_limit as quant_grouped_matmul_limit
from .quant_matmul import quant_matmul_limit as quant_matmul_limit
from .quant_matmul import weight_quant_matmul_limit as weight_quant_matmul_limit
from .rotary import FUSED_MROPE_SECTIONS as FUSED_MROPE_SECTIONS
from .rotary import apply_rotary_pos_emb_limit as apply_rotary_pos_emb_limit
from .rotary import interleave_rope_limit as interleave_rope_limit
from .rotary import interleaved_axes as interleaved_axes
from .rotary import interleaved_formulas_differ as interleaved_formulas_differ
from .rotary import interleaved_range_reason as interleaved_range_reason
from .rotary import mrope_limit as mrope_limit
from .rotary import rotary_embedding_limit as rotary_embedding_limit
from .rotary import rotary_mul_limit as rotary_mul_limit
from .rotary import rotary_position_embedding_limit as rotary_position_embedding_limit
from .rotary import vendor_sections as vendor_sections
from .row_wise import add_rms_norm_limit as add_rms_norm_limit
from .row_wise import dynamic_quant_limit as dynamic_quant_limit
from .row_wise import geglu_limit as geglu_limit
from .row_wise import rms_norm_limit as rms_norm_limit
from .row_wise import swiglu_limit as swiglu_limit
from .sparse import indexer_kl_loss_limit as indexer_kl_loss_limit
from .sparse import lightning_indexer_limit as lightning_indexer_limit
from .sparse import sparse_flash_attention_limit as sparse_flash_attention_limit
from .table import CONTRACTS as CONTRACTS
from .versions import SUPPORTED_TORCH_NPU as SUPPORTED_TORCH_NPU
from .versions import Installed as Installed
from .versions import call_arguments as call_arguments
from .versions import check_installed as check_installed
from .versions import release as release
from .versions import schema_arguments as schema_arguments

# The public names are those imported above, without the modules that they come from.
__all__ = sorted(name for name, value in vars().items() if name[0] != "_" and not isinstance(value, _ModuleType))
