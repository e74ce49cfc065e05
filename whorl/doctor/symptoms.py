"""The messages that frameworks print when a rotary path fails, or memory ends, each with its cause and its fix."""

import functools
from typing import Final

from whorl.doctor.checks.branch import BRIDGE_SECTIONS, mrope_settings
from whorl.doctor.memory_symptoms import MEMORY_SYMPTOMS
from whorl.doctor.symptom import Symptom, printed

# Frames in which q and k are multiplied by cos and sin.
_ROTATION = (
    r" in (?:\w+\.)*_?(?:npu_)?apply_\w*(?:rotary|rope)\w*:| in (?:\w+\.)*_?rotate_\w+:|\bcos_?\b.*\bsin_?\b.*|\* cos\b"
)
# Frames in which rows of a cos/sin table are looked up. A function that builds positions is not one of them.
_LOOKUP = (
    r"^(?!.* in \S*(?:get_rope_index|input_positions)).*"
    r"(?:cos_sin_cache|cos_sin\[|(?:cos|sin)_cached?\b|freqs_cis|rope_cache|\b(?:cos|sin)\[\s*position)"
)


# An exception raised where rows of the cos/sin table are looked up.
table_lookup = functools.partial(
    Symptom, "table-too-short", expected="every position below the number of table rows", raised_in=_LOOKUP
)
_MROPE_FIX = mrope_settings(list(BRIDGE_SECTIONS), mindspeed=True)
SYMPTOMS: Final = (
    *MEMORY_SYMPTOMS,
    Symptom(
        "rope-branch-mismatch",
        r"MultimodalRotaryEmbedding' object has no attribute 'get_rotary_seq_len'",
        cause="An MRoPE object runs in GPTModel's rope branch: only that branch calls get_rotary_seq_len, so "
        "position_embedding_type was 'rope'. This is Megatron Bridge before 0.5, whose class has no such method; "
        "adding one only moves the failure to the next call.",
        expected="position_embedding_type=mrope",
        fix=_MROPE_FIX,
    ),
    Symptom(
        "rope-branch-mismatch",
        r"MultimodalRotaryEmbedding\S*forward\(\) (got an unexpected keyword argument 'packed_seq'|missing "
        r".*'?mrope_section)",
        cause="The rope branch called an MRoPE object with a sequence length, as it calls plain RoPE. The mistake "
        "fails here from Megatron Bridge 0.5 on, where get_rotary_seq_len exists as a shim.",
        expected="position_embedding_type=mrope",
        fix=_MROPE_FIX,
    ),
    Symptom(
        "fused-rope-needs-rope",
        r"--use-fused-rotary-pos-emb must enable with ?--position-embedding-type=rope",
        cause="MindSpeed's fused RoPE was enabled outside the rope branch. Do not set the branch to rope for an MRoPE "
        "model: that is the next error.",
        expected="the switch off for MRoPE models",
        fix="remove --use-fused-rotary-pos-emb",
    ),
    Symptom(
        "rope-fusion-with-mrope",
        r"apply_rope_fusion is not supported for Qwen|apply_rope_fusion must be False for Qwen",
        cause="Bridge's apply_rotary_pos_emb_absolute refuses apply_rope_fusion for MRoPE, whose angles differ from "
        "token to token, while TransformerEngine's kernel takes one table for all sequences.",
        expected="apply_rope_fusion=False",
        fix="apply_rope_fusion=False (--no-rope-fusion)",
    ),
    Symptom(
        "rope-fusion-with-mrope",
        r"^AssertionError",
        raised_in=r" in apply_rotary_pos_emb_absolute: (?:assert not config\.apply_rope_fusion.*)?$",
        cause="apply_rotary_pos_emb_absolute of Bridge (before its wording of April 2026) or of MindSpeed-MM's mcore "
        "models refuses apply_rope_fusion for MRoPE, with an assertion that has no message.",
        expected="apply_rope_fusion=False",
        fix="apply_rope_fusion=False (--no-rope-fusion)",
    ),
    printed(
        "mrope-batch-unfused",
        r"apply_rope_fusion does not support mRoPE in bshd format when bs > 1",
        cause="TransformerEngine's kernel supports MRoPE only with a batch of 1 or in THD; Megatron runs the unfused "
        "code.",
        expected="apply_rope_fusion=False, or packed sequences",
        fix=("apply_rope_fusion=False", "or pack sequences (THD)"),
        severity="warning",
    ),
    Symptom(
        "mrope-without-sections",
        r"mrope require mrope_section setting",
        cause="The mrope branch was chosen and TransformerConfig has no mrope_section.",
        expected="three numbers that sum to half the rotary size",
        fix="--mrope-section with the numbers of config.json",
    ),
    Symptom(
        "mrope-section-sum",
        r"^AssertionError",
        raised_in=r"assert sum\(self\.mrope_section\) == self\.rotary_dim // 2",
        cause="mrope_section does not sum to half the rotary size.",
        expected="sections that sum to rotary_dim / 2",
        fix=("take mrope_section from the model's config.json", "check head_dim and partial_rotary_factor"),
    ),
    printed(
        "partial-rotary",
        r"Wrong rotaryCoeff",
        cause="ATB's _npu_rotary_embedding got heads of which only a part rotates (vllm-project/vllm-ascend#7252).",
        expected="rotary size equal to head size, or a caller that slices",
        fix=(
            "slice q and k to the rotary size before the call",
            "or install a newer vllm-ascend, which uses npu_mrope or Triton",
        ),
    ),
    Symptom(
        "partial-rotary",
        r"Fused rotary embedding is not supported in partial rope",
        cause="MindSpeed-LLM refuses --use-fused-rotary-pos-emb together with --use-partial-rope.",
        expected="only one of the two switches",
        fix="remove --use-fused-rotary-pos-emb",
    ),
    Symptom(
        "rotary-mode-spelling",
        r"(?i)rotary_?mode.{0,80}\binterleaved\b",
        cause="torch_npu 2.13 accepts rotary_mode 'half' and 'interleave'; 'interleaved' is only in the web page.",
        expected="rotary_mode='interleave'",
        fix=("rotary_mode=interleave", "in vllm-ascend: install triton-ascend"),
    ),
    Symptom(
        "cache-mode-missing",
        r"npu_mrope.{0,200}cache_mode|cache_mode.{0,120}(upgrade|CANN)",
        cause="cache_mode needs torch_npu 2.10, and 'interleave' CANN's V2 kernel (CANN 9.0).",
        expected="torch_npu 2.10 or newer and CANN 9.0 or newer",
        fix=("upgrade torch_npu and CANN", "or merge the axes first and use npu_rotary_mul"),
    ),
    Symptom(
        "cp-group-missing",
        r"apply_rotary_pos_emb\w*\(\) got an unexpected keyword argument 'cp_group'",
        cause="MindSpeed master replaces Megatron Core's apply_rotary_pos_emb by a function without cp_group.",
        expected="MindSpeed's branch core_r0.16.0 with Megatron Core 0.16",
        fix="install MindSpeed from branch core_r0.16.0",
    ),
    Symptom(
        "cp-group-missing",
        r"cp_group must be provided (for THD format RoPE|to get positional embedding)",
        cause="Packed or context-parallel RoPE was applied without its process group.",
        expected="cp_group passed on to apply_rotary_pos_emb",
        fix="pass cp_group, or upgrade the code that calls Megatron Core to 0.16",
    ),
    Symptom(
        "no-gradient",
        r"derivative for '?(npu::)?npu_(apply_rotary_pos_emb|interleave_rope)\w*'? is not implemented",
        cause="A training forward ran an operator that is only for inference and has no backward.",
        expected="npu_rotary_mul, plain torch or whorl.ops",
        fix="rotate with npu_rotary_mul or whorl.ops.rope in training",
    ),
    printed(
        "no-gradient",
        r"npu::npu_mrope: an autograd kernel was not registered",
        cause="npu_mrope dropped the gradient of q and k: attention weights upstream of it do not learn.",
        expected="an operator with a backward",
        fix="use whorl.ops.merge_mrope and rope, or merged cos and sin with npu_rotary_mul",
    ),
    table_lookup(
        r"^IndexError: index (?:out of range in self|-?\d+ is out of bounds for dimension \d+ with size \d+)"
        r"|^(?:IndexError|RuntimeError): (?:index_select\(\): |gather\(\): )?index .*out of (?:range|bounds)",
        cause="A position lies past the cos/sin table. For MRoPE the temporal axis can run ahead of the token count "
        "(vllm-project/vllm#47407).",
        fix=("lower the sequence length or the video length", "or build a longer table, or use rope scaling"),
    ),
    table_lookup(
        r"device-side assert triggered|illegal memory access",
        cause="The device failed where rows of the cos/sin table are looked up, probably by a position past its end. "
        "CUDA reports errors late, so an earlier kernel may be the cause.",
        fix=("run once with CUDA_LAUNCH_BLOCKING=1 to see the call that fails", "then lower the sequence length"),
        severity="warning",
    ),
    Symptom(
        "table-too-short",
        r"max_model_len \(?\d+\)? is greater than the derived max_model_len",
        cause="vLLM derives the longest sequence from the rotary config and refuses more.",
        expected="max_model_len within the rotary table",
        fix=("lower max_model_len", "or set rope scaling (YaRN) through hf_overrides"),
    ),
    Symptom(
        "kv-heads-tp",
        r"num_query_groups \(\d+\) must be a multiple or divisor of",
        cause="The key/value heads can be neither split nor replicated evenly over the tensor-parallel ranks.",
        expected="a tensor parallel size that divides or is divided by num_query_groups",
        fix="change tensor_model_parallel_size",
    ),
    Symptom(
        "kv-heads-tp",
        r"[Nn]umber of attention heads \(\d+\) must be divisible by tensor parallel size"
        r"|num_attention_heads \(\d+\) must be a multiple of tensor_model_parallel_size",
        cause="The query heads cannot be split evenly over the tensor-parallel ranks.",
        expected="a tensor parallel size that divides the number of heads",
        fix=("change the tensor parallel size", "or use the other ranks for pipeline parallelism"),
    ),
    Symptom(
        "rope-fusion-with-dsa",
        r"RoPE fusion is not supported for DSAttention",
        cause="Megatron Core asserts that RoPE fusion is off for DSAttention.",
        expected="apply_rope_fusion=False",
        fix="apply_rope_fusion=False",
    ),
    Symptom(
        "mla-fusion-needs-yarn",
        r"apply_rope_fusion for MLA only works with YARN RoPE",
        cause="Megatron Core's fused MLA rotation works with YaRN only.",
        expected="rope_type=yarn, or apply_rope_fusion=False",
        fix="apply_rope_fusion=False",
    ),
    Symptom(
        "mla-fusion-needs-yarn",
        r"multi_latent_attention does not support apply_rope_fusion",
        cause="Megatron Core 0.11 has no fused rotation for multi-latent attention, and its arguments turn "
        "apply_rope_fusion on by default (NVIDIA/Megatron-LM#1411).",
        expected="apply_rope_fusion=False",
        fix="--no-rope-fusion",
    ),
    Symptom(
        "rope-fusion-unavailable",
        r"apply_rope_fusion is not available",
        cause="apply_rope_fusion needs TransformerEngine 1.4 or newer, which does not exist on an NPU.",
        expected="TransformerEngine installed, or apply_rope_fusion=False",
        fix=("apply_rope_fusion=False (--no-rope-fusion)", "or install transformer-engine"),
    ),
    printed(
        "yarn-factor-ignored",
        r"mscale=\S+ is not supported by TE's fused RoPE",
        cause="TransformerEngine's kernel cannot multiply by mscale; Megatron runs the unfused code, which does.",
        expected="nothing to change: the result is right, only slower",
        fix="apply_rope_fusion=False silences the message",
        severity="note",
    ),
    Symptom(
        "low-precision-angles",
        r"cos_sin_cache should be float32",
        cause="FlashInfer takes a float32 table; this one was cast to the model's dtype.",
        expected="a float32 cos/sin table",
        fix="keep the table in float32: do not call .to(bfloat16) on the whole model",
    ),
    printed(
        "operator-limit",
        r"please do not use RotaryPositionEmbedding fusion operator",
        cause="npu_rotary_mul was called in BNSD with a large B*N, or with a head size that is not 32-byte aligned "
        "(modelscope/ms-swift#9329).",
        expected="BSND or SBND, or plain torch",
        fix=("transpose q and k to BSND before the call", "or use plain torch for this shape"),
    ),
    printed(
        "cos-sin-shape",
        r"op\[ApplyRotaryPosEmb\], all input dim\d must equal",
        cause="cos and sin passed to npu_apply_rotary_pos_emb have another number of tokens than q and k "
        "(LMCache/LMCache-Ascend#152).",
        expected="cos and sin of the same tokens as q and k",
        fix="look up cos and sin with the positions of the same tokens",
    ),
    Symptom(
        "operator-limit",
        r"call aclnn(?:ApplyRotaryPosEmb|RotaryPositionEmbedding|RotaryMul|InterleaveRope|RopeWithSinCosCache)\w* "
        r"failed",
        cause="The vendor's rotary operator refused its arguments; the lines below the error name the limit.",
        expected="a call within the operator's documented limits (docs/doctor.md, operator-limit)",
        fix=("compare shapes and dtypes with the operator's document", "or use plain torch for this model"),
    ),
    Symptom(
        "rotary-offsets",
        r"Batched rotary embedding is currently not supported on NPU",
        cause="The rotary class got offsets into a table of several scalings, as adapters with a context length of "
        "their own pass them; vllm-ascend rotates by one table.",
        expected="adapters of one context length",
        fix="remove --long-lora-scaling-factors",
    ),
    Symptom(
        "operator-missing",
        r"module 'torch_npu' has no attribute '_?npu_(?:rotary|mrope|apply_rotary|interleave_rope)\w*'"
        r"|'_OpNamespace' '(?:npu|atb)' object has no attribute '_?npu_(?:rotary|mrope|apply_rotary|interleave_rope)",
        cause="This torch_npu is older than the code that calls it: _npu_rotary_embedding is new in 2.5.1 (not in "
        "2.5.1rc1, vllm-project/vllm-ascend#379), npu_mrope later.",
        expected="the torch_npu version that the release notes of vllm-ascend name",
        fix="upgrade torch_npu and CANN together",
    ),
    Symptom(
        "rotary-interface",
        r"(?<!Multimodal)RotaryEmbedding\.forward\w*\(\) (?:takes|missing|got an unexpected)"
        r"|RotaryEmbedding' object has no attribute '(?:cos|sin|cos_cached|sin_cached|cos_sin_cache)'",
        cause="The rotary class and the code that calls it come from incompatible package versions "
        "(vllm-project/vllm-ascend#3521, #5111, #5385).",
        expected="vllm and vllm-ascend of one release",
        fix="install the vllm version that this vllm-ascend names",
    ),
    Symptom(
        "rope-config-spelling",
        r"^KeyError: '(?:type|rope_type|factor|original_max_position_embeddings|low_freq_factor|mrope_section)'",
        raised_in=r"rope_scaling|rope_parameters| in _init_rope:|rope_utils\.py",
        cause="The code that failed reads another spelling of the rope dictionary than config.json uses: 'type' became "
        "'rope_type' in transformers 4.43, rope_scaling became rope_parameters in 5.",
        expected="both spellings in config.json, or code of the same transformers version",
        fix=(
            'write both "type" and "rope_type" into rope_scaling',
            "or install the transformers version that the code was written for",
        ),
    ),
    Symptom(
        "rope-config-spelling",
        r"`rope_scaling` must be a dictionary with (?:with )?two fields|[Uu]nknown RoPE scaling type",
        cause="The code that failed knows fewer rope types than config.json names: transformers before 4.43 knows "
        "only 'linear' and 'dynamic'.",
        expected="code that knows this rope type",
        fix="upgrade transformers, or the library that holds this model's code",
    ),
    Symptom(
        "position-ids-shape",
        r"^IndexError: too many indices for tensor of dimension [12]",
        raised_in=r"(?:rotary_pos_embedding|rotary_embedding|rope|rope_utils)\.py in forward:|\[:, :, None, :\]",
        cause="MRoPE got position ids of one axis, [B, S]; its rotary class indexes [3, B, S] (alibaba/ROLL#231).",
        expected="position_ids [3, B, S], or [3, 1, T] when packed",
        fix="build position_ids with get_rope_index (whorl.positions)",
    ),
    Symptom(
        "position-ids-shape",
        r"^RuntimeError: The size of tensor a \(\d\) must match the size of tensor b \(\d\) at non-singleton "
        r"dimension 0",
        raised_in=r"position_ids_expanded|seq_expanded",
        cause="Position ids have another number of axes than the three that the rotary class expands: a fourth one for "
        "text positions was not removed (modelscope/ms-swift#5742).",
        expected="position_ids [3, B, S]",
        fix="pass position_ids[1:] to the rotary embedding, or install a transformers that does so",
    ),
    Symptom(
        "position-ids-shape",
        r"^RuntimeError: shape '\[\d+, -1, \d+\]' is invalid for input of size \d+",
        raised_in=r"rotary_embedding\S* in forward\w*:",
        cause="Plain RoPE got positions of three axes and counts each axis as tokens (vllm-project/vllm#52973).",
        expected="positions [T] for RotaryEmbedding; [3, T] is for MRotaryEmbedding",
        fix="give the draft model the model's rotary class, or positions of one axis",
    ),
    Symptom(
        "rope-index-inputs",
        r"^(?:IndexError|RuntimeError: shape mismatch|TypeError: 'NoneType' object is not an iterator|"
        r"StopIteration)",
        raised_in=r" in (?:get_rope_index|_?get_\w*input_positions\w*):",
        cause="Positions are built from input_ids, attention_mask and the image grids together, and these do not "
        "fit each other: a prompt was cut off inside an image, or a grid is missing.",
        expected="as many grids as image placeholders, and a mask of the same tokens",
        fix=("do not cut prompts inside an image (raise the maximum prompt length)", "pass the grids of this batch"),
    ),
    Symptom(
        "cos-sin-shape",
        r"^RuntimeError: (?:The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)"
        r"|Sizes of tensors must match except in dimension|The expanded size of the tensor)",
        raised_in=_ROTATION,
        cause="cos and sin have other tokens, or another rotary size, than q and k: the positions have another length "
        "(a cache, packing or context parallelism was applied to only one of them), or the head rotates in part.",
        expected="cos and sin with one row for each token of q and k",
        fix=("print the shapes of q and cos at this line", "build cos and sin from the position_ids of the same call"),
    ),
    Symptom(
        "vime-on-npu",
        r"Cannot determine parallelism type for module 'MindSpeed\w+'",
        cause="MindSpeed replaced a layer of TransformerEngine by one of its own, whose name Megatron Bridge's "
        "AutoMapping does not know, so weights are not loaded (vllm-project/vime#314).",
        expected="MindSpeed's layers registered before the weights are loaded",
        fix=(
            "AutoMapping.register_module_type('MindSpeedTEColumnParallelLinear', 'column'), by the name in the message",
            "or a vime of July 2026, whose patch of Bridge does it",
        ),
    ),
    Symptom(
        "gated-delta-context-parallel",
        r"cannot import name 'tensor_a2a_(?:cp2hp|hp2cp)' from 'megatron\.core\.ssm\.gated_delta_net'"
        r"|Gated delta net does not support context parallel"
        r"|GatedDeltaNet\.__init__\(\) got an unexpected keyword argument 'cp_comm_type'",
        cause="Context parallelism of gated delta layers (Qwen3-Next, Qwen3.5) is newer than this Megatron Core, or "
        "than what MindSpeed and the bridge give each other (modelscope/ms-swift#9814, NVIDIA/Megatron-LM#4374).",
        expected="context_parallel_size=1, or Megatron Core 0.18 and a bridge made for it",
        fix=("context_parallel_size=1", "or update megatron-core, the bridge and MindSpeed together"),
    ),
)
