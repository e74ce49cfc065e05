"""Signatures and documented limits of the Ascend operators, by version: plain data and pure functions, without torch.

`CONTRACTS` holds the signatures of torch_npu 2.13 (and one of MindSpeed). `<operator>_limit` takes the shapes, dtypes
and options of a call and returns the documented device limit that the call breaks, in words, or None.
`schema_arguments` reads the signatures of an installed torch_npu, and `check_installed` checks its version. The limits
are those documented for Atlas A2 and A3; the date in each docstring is that of the vendor's page (docs/zh/custom_APIs
of op-plugin, read in November 2026). `whorl.ops`, `whorl.ascend` and the doctor all use this package.
"""

from .attention import (
    MASK_SIZE,
    PAGE_SIZES,
    antiquant_limit,
    fused_infer_attention_limit,
    fusion_attention_limit,
    scatter_nd_update_limit,
    scatter_pa_kv_cache_limit,
    top_k_top_p_limit,
)
from .contract import REQUIRED, Contract, Parameter, parse_schema
from .matmul import (
    all_gather_mm_limit,
    grouped_matmul_limit,
    linear_limit,
    mm_all_reduce_limit,
    mm_reduce_scatter_limit,
    transpose_batchmatmul_limit,
)
from .moe import (
    moe_finalize_routing_limit,
    moe_gating_top_k_limit,
    moe_gating_top_k_softmax_limit,
    moe_init_routing_limit,
    moe_token_permute_limit,
)
from .quant_matmul import (
    antiquant_grouped_matmul_limit,
    quant_grouped_matmul_limit,
    quant_matmul_limit,
    weight_quant_matmul_limit,
)
from .rotary import (
    apply_rotary_pos_emb_limit,
    interleave_rope_limit,
    mrope_limit,
    rotary_embedding_limit,
    rotary_mul_limit,
    rotary_position_embedding_limit,
)
from .row_wise import add_rms_norm_limit, dynamic_quant_limit, geglu_limit, rms_norm_limit, swiglu_limit
from .sections import (
    FUSED_MROPE_SECTIONS,
    interleaved_axes,
    interleaved_formulas_differ,
    interleaved_range_reason,
    vendor_sections,
)
from .sparse import indexer_kl_loss_limit, lightning_indexer_limit, sparse_flash_attention_limit
from .table import CONTRACTS
from .versions import SUPPORTED_TORCH_NPU, Installed, call_arguments, check_installed, release, schema_arguments

__all__ = [
    "CONTRACTS",
    "FUSED_MROPE_SECTIONS",
    "MASK_SIZE",
    "PAGE_SIZES",
    "REQUIRED",
    "SUPPORTED_TORCH_NPU",
    "Contract",
    "Installed",
    "Parameter",
    "add_rms_norm_limit",
    "all_gather_mm_limit",
    "antiquant_grouped_matmul_limit",
    "antiquant_limit",
    "apply_rotary_pos_emb_limit",
    "call_arguments",
    "check_installed",
    "dynamic_quant_limit",
    "fused_infer_attention_limit",
    "fusion_attention_limit",
    "geglu_limit",
    "grouped_matmul_limit",
    "indexer_kl_loss_limit",
    "interleave_rope_limit",
    "interleaved_axes",
    "interleaved_formulas_differ",
    "interleaved_range_reason",
    "lightning_indexer_limit",
    "linear_limit",
    "mm_all_reduce_limit",
    "mm_reduce_scatter_limit",
    "moe_finalize_routing_limit",
    "moe_gating_top_k_limit",
    "moe_gating_top_k_softmax_limit",
    "moe_init_routing_limit",
    "moe_token_permute_limit",
    "mrope_limit",
    "parse_schema",
    "quant_grouped_matmul_limit",
    "quant_matmul_limit",
    "release",
    "rms_norm_limit",
    "rotary_embedding_limit",
    "rotary_mul_limit",
    "rotary_position_embedding_limit",
    "scatter_nd_update_limit",
    "scatter_pa_kv_cache_limit",
    "schema_arguments",
    "sparse_flash_attention_limit",
    "swiglu_limit",
    "top_k_top_p_limit",
    "transpose_batchmatmul_limit",
    "vendor_sections",
    "weight_quant_matmul_limit",
]
