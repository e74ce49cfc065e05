"""The table of known operators, with the signatures of torch_npu 2.13."""

from dataclasses import replace
from typing import Any, Final

from .contract import Contract
from .sparse import SPARSE

_TABLE = (
    Contract(
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
        added={"2.10": "rotate"},
        gradient="yes",
        note="input*cos + rot(input)*sin with cos and sin of full width, cast to input's dtype first. With `rotate` "
        "the backward pass still uses rotary_mode, which is documented as unsupported. Saves input for it.",
    ),
    Contract(
        "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, int[]? "
        "mrope_section=None, str? rotary_mode='half', str? cache_mode='default') -> (Tensor, Tensor)",
        added={"2.10": "cache_mode"},
        note="rotary_mode says which channels pair up ('interleave', not 'interleaved'); cache_mode says which axis a "
        "channel belongs to. cache_mode='interleave' needs the V2 kernel (CANN 9.0.0 or newer).",
    ),
    Contract(
        "npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        gradient="raises",
        note="Reads adjacent pairs and writes half order, as DeepSeek-V3 does; this is not GPT-J RoPE.",
    ),
    Contract(
        "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSND', str "
        "rotary_mode='half') -> (Tensor, Tensor)",
        gradient="raises",
        in_place=("query", "key"),
        changes=(("2.11", "default of layout changed from BSH to BSND"),),
        note="Overwrites query and key and returns them, though its schema declares no mutation: unsafe under "
        "torch.compile. An unknown layout string means BSND on the device.",
    ),
    Contract(
        "_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor "
        "cos_sin_cache, bool is_neox_style) -> ()",
        in_place=("query", "key"),
        namespace="atb",
        note="Uses the cos and sin of the process's first call in every later call: a second table is ignored. Needs "
        "the NNAL/ATB package; has no meta kernel.",
    ),
    Contract(
        "npu_rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor",
        gradient="partial",
        namespace=None,
        library="mindspeed",
        note="MindSpeed's own extension over the kernel of npu_rotary_mul; mode 0 is half, 1 is interleave. cos and "
        "sin get a gradient only when both require one.",
    ),
    Contract(
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        gradient="yes",
        note="Returns y and rstd; rstd is float32 with the dimensions of gamma set to 1.",
    ),
    Contract(
        "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
        gradient="raises",
        note="Returns y, rstd (float32) and x1 + x2, in this order.",
    ),
    Contract(
        "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        gradient="yes",
        note="Returns silu(first half) * second half along dim.",
    ),
    Contract(
        "npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)",
        gradient="yes",
        note="first half * gelu(second half) along dim; with activate_left gelu(first half) * second half. "
        "approximate 1 uses tanh, 0 uses erf. Returns the product, and the gelu by itself, both in input's dtype.",
    ),
    Contract("npu_gelu_backward(Tensor grad_output, Tensor input, *, str approximate='none') -> Tensor"),
    Contract(
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
        "str quant_mode='pertoken', float dst_type_max=0.0) -> (Tensor, Tensor)",
        added={"2.10": "quant_mode dst_type_max"},
        note="Symmetric: scale is a row's largest magnitude divided by the largest code, float32; y is input / scale. "
        "From 2.10 on dst_type is an int, which may also be a torch.dtype.",
    ),
    # Matmuls fused with a collective.
    Contract(
        "npu_mm_reduce_scatter_base(Tensor input, Tensor x2, str hcom, int world_size, *, str reduce_op='sum', "
        "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int comm_turn=0, ScalarType? "
        "output_dtype=None, str? comm_mode=None) -> Tensor",
        note="Returns this rank's rows of the sum over ranks of input @ x2; hcom is HCCL's name of the communicator.",
    ),
    Contract(
        "npu_all_gather_base_mm(Tensor input, Tensor x2, str hcom, int world_size, *, Tensor? bias=None, Tensor? "
        "x1_scale=None, Tensor? x2_scale=None, int gather_index=0, bool gather_output=True, int comm_turn=0, "
        "ScalarType? output_dtype=None, str? comm_mode=None) -> (Tensor, Tensor)",
        note="Returns the gathered rows @ x2, and the gathered rows.",
    ),
    Contract(
        "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, Tensor? "
        "antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, Tensor? "
        "pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None, int "
        "antiquant_group_size=0, int comm_turn=0, int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None, "
        "int? x2_dtype=None, int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0, "
        "str? comm_mode=None) -> Tensor",
        added={
            "2.10": "group_sizes y_dtype x1_dtype x2_dtype dequant_scale_dtype pertoken_scale_dtype comm_quant_mode",
            "2.11": "comm_mode",
        },
        note="Returns the sum over ranks of x1 @ x2, for prefill; all such operators of a model share one "
        "communicator.",
    ),
    # Attention for training.
    Contract(
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int "
        "pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? "
        "actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
        "sync=False, str softmax_layout='', Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) "
        "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
        added={"2.10": "dropout_mask seed offset"},
        gradient="yes",
        note="True in atten_mask hides a key; sparse_mode 3 needs a 2048 x 2048 upper triangle for any lengths, and "
        "aligns the last query with the last key. scale defaults to 1. The softmax's max and sum are float32 [B, N, "
        "S, 8], each number repeated 8 times.",
    ),
    # Inference.
    Contract(
        "npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
        gradient="yes",
        note="input @ weight.T + bias. The page lists float32 and float16; the kernels behind it, aclnnMm and "
        "aclnnAddmm, support bfloat16 too.",
    ),
    Contract(
        "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
        "slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, str? "
        "cache_mode='PA_NZ') -> ()",
        added={"2.10": "cache_mode"},
        in_place=("key_cache", "value_cache"),
        note="Writes [T, N, D] into [blocks, block size, N, D]; that layout is cache_mode 'Norm', not the default. "
        "Slots must be inside the cache and different from each other; there is no value that skips a token.",
    ),
    Contract(
        "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
        in_place=("input",),
        note="input[indices[i]] = updates[i]. Indices must be in range, and there is no value that skips a row; of "
        "equal indices any update may win.",
    ),
    Contract(
        "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, int[]? "
        "perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor",
        note="Returns a matmul per batch, [M, B, N]; perm_x1 says whether input is [B, M, K] or [M, B, K]. bias must "
        "be None.",
    ),
    Contract(
        "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? "
        "atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? "
        "dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
        "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? "
        "key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? "
        "value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? "
        "kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? "
        "actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? "
        "key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, int "
        "next_tokens=2147483647, str input_layout='BSH', int num_key_value_heads=0, int sparse_mode=0, int "
        "inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, int "
        "value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
        note="True in atten_mask hides a key. sparse_mode 2, 3 and 4 need a 2048 x 2048 upper triangle for any "
        "lengths; with one query sparse_mode, pre_tokens and next_tokens are ignored. TND lengths are cumulative, "
        "except those of a paged KV cache. scale defaults to 1, not to 1/sqrt(D).",
    ),
    Contract(
        "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, "
        "Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, "
        "SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? "
        "dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? "
        "dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? "
        "quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int num_query_heads=1, int "
        "num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str "
        "input_layout='BSH', int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int "
        "value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, int? "
        "key_dtype=None, int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, int? "
        "key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? "
        "dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, "
        "int? out_dtype=None) -> (Tensor, Tensor)",
        added={"2.10": "quant_scale_p out_dtype"},
        note="npu_fused_infer_attention_score with other names and learnable_sink, one number for each query head that "
        "joins the softmax as a scaled score without a value.",
    ),
    Contract(
        "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0, "
        "float bias=1.0, bool interleaved=True) -> Tensor",
        note="(up + bias) * gate * sigmoid(alpha * gate) with gate at most limit and up within limit of 0; "
        "interleaved: gate in even, up in odd channels.",
    ),
    Contract(
        "npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor",
        note="Sets logits to minus infinity: those below the k-th highest, then those where the probability of the "
        "higher ones reaches p. Keeps logits equal to the k-th; of equal logits at the edge of p it keeps the higher "
        "ids.",
    ),
    # Mixture of experts.
    Contract(
        "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
        gradient="raises",
        note="Softmax, then top-k, not renormalised. Returns weights, ids (the number of experts in finished rows) "
        "and row_idx[i, j] = j * rows + i, column by column.",
    ),
    Contract(
        "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
        "int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool "
        "out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)",
        added={"2.13": "input_ids tid2eid"},  # routing by token id
        gradient="yes",
        note="norm_type 0 is softmax, 1 sigmoid; only sigmoid weights are divided by their sum. bias only influences "
        "the choice. group_select_mode 0 ranks a group by its best expert, 1 by the sum of its best two.",
    ),
    Contract(
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int "
        "active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
        "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
        "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        added={"2.10": "x_dtype"},
        changes=(("2.10", "default of quant_mode changed from 0 to -1"),),
        note="Copies each row K times, sorted by expert. expanded_row_idx of type 0 has the row that copy (i, j) went "
        "to, row by row; type 1 has the copy that each row holds.",
    ),
    Contract(
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? "
        "scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) -> "
        "Tensor",
        added={"2.13": "k"},
        note="Returns skip1 + skip2 + the weighted sum of each token's rows. Modes 0 and 1 read the index column by "
        "column (i + j * rows), 2 and 3 row by row; 1 and 3 have rows [E, capacity, H] and skip index -1.",
    ),
    Contract(
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? "
        "offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
        "per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? "
        "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? "
        "group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
        "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> "
        "Tensor[]",
        added={"2.10": "x_dtype weight_dtype scale_dtype per_token_scale_dtype"},
        note="group_type -1: one matmul for each pair of x and weight; 0: the rows of x in groups; 2: the sum over "
        "the rows of each group, for the gradient of weight. group_list is cumulative (type 0) or has counts (type "
        "1). From 2.10 on output_dtype is an int, which may also be a torch.dtype.",
    ),
    Contract(
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
        "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, int? "
        "pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
        added={"2.10": "x1_dtype x2_dtype pertoken_scale_dtype scale_dtype y_scale"},
        note="Computes x1 @ x2 in int8, times scale and pertoken_scale, plus bias; a bias of int32 is added before "
        "the scales. The result is int8 unless output_dtype says otherwise.",
    ),
    Contract(
        "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, "
        "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0, int "
        "inner_precise=0, int? weight_dtype=None) -> Tensor",
        added={"2.10": "weight_dtype"},
        note="Returns x @ ((weight + antiquant_offset) * antiquant_scale) + bias: the offset is added, not "
        "subtracted. A weight in int32 is int4: [K, N / 8], or transposed [K / 8, N]. On Atlas A2 and A3 it is not "
        "deterministic by default.",
    ),
    Contract(
        "npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor",
        note="Packs eight neighbours of the last dim, int32 from -8 to 7, into one int32, the first in the lowest "
        "bits. It copies the weight to the host and packs it there, in one thread.",
    ),
    Contract(
        "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> "
        "(Tensor, Tensor)",
        gradient="yes",
        note="permuted[sorted[i * K + j]] = tokens[i]: row by row, unlike npu_moe_init_routing.",
    ),
    Contract(
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool "
        "padded_mode=False, int[]? restore_shape=None) -> Tensor",
        gradient="yes",
        note="Returns the weighted sum of each token's K rows; without probs K is 1 and nothing is summed.",
    ),
    # Backward operators, for callers that define their own autograd functions.
    Contract(
        "npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> (Tensor, "
        "Tensor, Tensor)",
        note="Returns the gradients of input, r1 and r2, in input's dtype.",
    ),
    Contract(
        "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
        note="Returns the gradients of input, in its dtype, and of gamma, in float32.",
    ),
    Contract(
        "npu_moe_token_permute_grad(Tensor tokens, Tensor grad_permuted_tokens, Tensor indices, Tensor "
        "sorted_indices, bool padded_mode=False) -> Tensor",
        note="Returns the sum of each token's K rows of grad_permuted_tokens; only the shape and dtype of tokens are "
        "used.",
    ),
    Contract(
        "npu_moe_token_unpermute_grad(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
        "Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> (Tensor, Tensor)",
        note="Returns the gradients of permuted_tokens and of probs, each in its own dtype.",
    ),
    Contract(
        "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, "
        "*, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? "
        "softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float "
        "keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int "
        "offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int "
        "sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout='', Tensor? sink=None) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        note="Returns the gradients of query, key, value, pse and sink.",
    ),
    Contract(
        "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None, Tensor? "
        "initial_state=None, Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None) -> (Tensor, Tensor)",
        since="2.11",
        note="query and key [T, NK, DK] are normalised before; value [T, NV, DV]; returns out and the states after the "
        "sequences, [B, NV, DV, DK] in the dtype of initial_state: bf16, on Ascend 950 fp32 as well. Nothing is "
        "promised of its bits, nor that decoding continues it with equal ones.",
    ),
    Contract(
        "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? "
        "beta=None, float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? "
        "num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
        in_place=("state",),
        note="The state after token t is stored at state[ssm_state_indices[t]], rounded to bf16. A sequence begins "
        "with that of its token num_accepted_tokens - 1. At most 8 tokens of a sequence.",
    ),
    Contract(
        "npu_fused_causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_states, *, Tensor? query_start_loc=None, "
        "Tensor? cache_indices=None, Tensor? initial_state_mode=None, Tensor? bias=None, Tensor? "
        "num_accepted_tokens=None, str? activation='None', int? pad_slot_id=-1, int? run_mode=0, int? "
        "residual_connection=0, int? max_query_len=-1, Tensor? num_computed_tokens=None, Tensor? "
        "block_idx_first_scheduled_token=None, Tensor? block_idx_last_scheduled_token=None, Tensor? "
        "initial_state_idx=None, int? block_size=128, str? conv_mode='default') -> Tensor",
        since="2.10",
        added={
            "2.11": "max_query_len num_computed_tokens block_idx_first_scheduled_token block_idx_last_scheduled_token "
            "initial_state_idx block_size conv_mode"
        },
        renamed={"activation": ("2.11", "activation_mode")},
        in_place=("conv_states",),
        note="Three taps, on Atlas 350 alone; bias and activation have no effect. The four taps and SiLU of Qwen3.5 it "
        "cannot compute.",
    ),
    Contract("npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor"),
)
# AscendC's batch-invariant operators, a package of their own, which publishes no schemas: these are the calls that
# vllm-ascend, SGLang and MindSpeed make (read in November 2026). Their callers pass tensors and dims by position; only
# attention takes names, because vllm-ascend puts it in the place of torch_npu's.
_PACKAGE: Final[dict[str, Any]] = {"namespace": "batch_invariant_ops", "library": "batch_invariant_ops", "since": "1.0"}
_ATTENTION = next(contract for contract in _TABLE if contract.name == "npu_fused_infer_attention_score")
_BATCH_INVARIANT = (
    Contract(
        "npu_mm_batch_invariant(Tensor a, Tensor b) -> Tensor",
        **_PACKAGE,
        note="a [M, K] @ b [K, N] in fp16, bf16 or fp32, rounded to that dtype. There is no bias.",
    ),
    Contract("npu_reduce_sum_batch_invariant(Tensor x, int dim, bool keepdim) -> Tensor", **_PACKAGE),
    Contract("npu_log_softmax_batch_invariant(Tensor x, int dim) -> Tensor", **_PACKAGE),
    replace(_ATTENTION, schema=_ATTENTION.schema.replace("(", "_batch_invariant(", 1), **_PACKAGE),
)
CONTRACTS: Final[dict[str, Contract]] = {contract.name: contract for contract in (*_TABLE, *SPARSE, *_BATCH_INVARIANT)}
