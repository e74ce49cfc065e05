"""Tracebacks and logs: known texts, the finding each stands for, and what to do."""

import re
from dataclasses import dataclass
from typing import Final

from whorl.doctor.checks.branch import BRIDGE_SECTIONS, mrope_settings
from whorl.doctor.report import Finding, Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """A pattern of a log line and its cause. `code` is that of the check which finds it before the launch."""

    code: str
    pattern: str
    cause: str
    fix: tuple[str, ...]
    expected: str
    severity: Severity = "error"


_MROPE_FIX = mrope_settings(list(BRIDGE_SECTIONS), mindspeed=True)
SYMPTOMS: Final = (
    Symptom(
        code="rope-branch-mismatch",
        pattern=r"MultimodalRotaryEmbedding' object has no attribute 'get_rotary_seq_len'",
        cause="An MRoPE object was sent into GPTModel's rope branch: wherever get_rotary_seq_len is called, "
        "position_embedding_type was 'rope'. This is Megatron Bridge before 0.5, whose class has no such method; "
        "adding one only moves the failure to the call that follows.",
        expected="position_embedding_type=mrope",
        fix=_MROPE_FIX,
    ),
    Symptom(
        code="rope-branch-mismatch",
        pattern=r"MultimodalRotaryEmbedding\S*forward\(\) (got an unexpected keyword argument 'packed_seq'|missing "
        r".*'?mrope_section)",
        cause="An MRoPE object was called as the rope branch calls plain RoPE, with a sequence length. This is the "
        "form the mistake takes from Megatron Bridge 0.5 on, where get_rotary_seq_len exists as a shim.",
        expected="position_embedding_type=mrope",
        fix=_MROPE_FIX,
    ),
    Symptom(
        code="fused-rope-needs-rope",
        pattern=r"--use-fused-rotary-pos-emb must enable with ?--position-embedding-type=rope",
        cause="MindSpeed's fused RoPE was asked for outside the rope branch. Do not answer by setting the branch to "
        "rope for an MRoPE model: that is the next error.",
        expected="the switch off for MRoPE models",
        fix=("remove --use-fused-rotary-pos-emb",),
    ),
    Symptom(
        code="rope-fusion-with-mrope",
        pattern=r"assert not config\.apply_rope_fusion",
        cause="Bridge's apply_rotary_pos_emb_absolute refuses apply_rope_fusion for MRoPE.",
        expected="apply_rope_fusion=False",
        fix=("apply_rope_fusion=False (--no-rope-fusion)",),
    ),
    Symptom(
        code="mrope-batch-unfused",
        pattern=r"apply_rope_fusion does not support mRoPE in bshd format when bs > 1",
        cause="TransformerEngine's kernel takes MRoPE only with a batch of 1 or in THD; Megatron runs the unfused "
        "code.",
        expected="apply_rope_fusion=False, or packed sequences",
        fix=("apply_rope_fusion=False", "or pack sequences (THD)"),
        severity="warning",
    ),
    Symptom(
        code="mrope-without-sections",
        pattern=r"mrope require mrope_section setting",
        cause="The mrope branch was chosen and TransformerConfig has no mrope_section.",
        expected="three numbers that sum to half the rotary size",
        fix=("--mrope-section with the numbers of config.json",),
    ),
    Symptom(
        code="mrope-section-sum",
        pattern=r"assert sum\(self\.mrope_section\) == self\.rotary_dim // 2",
        cause="mrope_section does not sum to half the rotary size.",
        expected="sections that sum to rotary_dim / 2",
        fix=("take mrope_section from the model's config.json", "check head_dim and partial_rotary_factor"),
    ),
    Symptom(
        code="partial-rotary",
        pattern=r"Wrong rotaryCoeff",
        cause="ATB's _npu_rotary_embedding got a head of which only a part rotates (vllm-project/vllm-ascend#7252).",
        expected="rotary size equal to head size, or a caller that slices",
        fix=(
            "slice q and k to the rotary size before the call",
            "or a newer vllm-ascend, which uses npu_mrope or Triton",
        ),
    ),
    Symptom(
        code="partial-rotary",
        pattern=r"Fused rotary embedding is not supported in partial rope",
        cause="MindSpeed-LLM refuses --use-fused-rotary-pos-emb together with --use-partial-rope.",
        expected="one of them",
        fix=("remove --use-fused-rotary-pos-emb",),
    ),
    Symptom(
        code="rotary-mode-spelling",
        pattern=r"(?i)rotary_?mode.{0,80}\binterleaved\b",
        cause="torch_npu 2.13 accepts rotary_mode 'half' and 'interleave'; 'interleaved' stands in the web page only.",
        expected="rotary_mode='interleave'",
        fix=("rotary_mode=interleave", "in vllm-ascend: install triton-ascend"),
    ),
    Symptom(
        code="cache-mode-missing",
        pattern=r"npu_mrope.{0,200}cache_mode|cache_mode.{0,120}(upgrade|CANN)",
        cause="cache_mode needs torch_npu 2.10, and 'interleave' CANN's V2 kernel (CANN 9.0).",
        expected="torch_npu 2.10 or newer and CANN 9.0 or newer",
        fix=("upgrade torch_npu and CANN", "or merge the axes first and use npu_rotary_mul"),
    ),
    Symptom(
        code="cp-group-missing",
        pattern=r"apply_rotary_pos_emb\w*\(\) got an unexpected keyword argument 'cp_group'",
        cause="MindSpeed master replaced Megatron Core's apply_rotary_pos_emb by one without cp_group.",
        expected="MindSpeed's branch core_r0.16.0 with Megatron Core 0.16",
        fix=("install MindSpeed from branch core_r0.16.0",),
    ),
    Symptom(
        code="cp-group-missing",
        pattern=r"cp_group must be provided (for THD format RoPE|to get positional embedding)",
        cause="Packed or context-parallel RoPE was applied without its process group.",
        expected="cp_group handed through to apply_rotary_pos_emb",
        fix=("pass cp_group, or upgrade the code that calls Megatron Core to 0.16",),
    ),
    Symptom(
        code="no-gradient",
        pattern=r"derivative for '?(npu::)?npu_(apply_rotary_pos_emb|interleave_rope)\w*'? is not implemented",
        cause="An inference operator was used in a training forward; its backward does not exist.",
        expected="npu_rotary_mul, plain torch or whorl.ops",
        fix=("rotate with npu_rotary_mul or whorl.ops.rope in training",),
    ),
    Symptom(
        code="no-gradient",
        pattern=r"npu::npu_mrope: an autograd kernel was not registered",
        cause="npu_mrope dropped the gradient of q and k: attention weights upstream of it do not learn.",
        expected="an operator with a backward",
        fix=("whorl.ops.mrope, or merged cos and sin with npu_rotary_mul",),
    ),
    Symptom(
        code="table-too-short",
        pattern=r"(?s)(rotary|rope|cos_sin_cache)[^\n]*\n?.{0,2000}?(index out of bounds|index \d+ is out of "
        r"bounds|out of range)",
        cause="A position lies past the cos/sin table. For MRoPE the temporal axis can run ahead of the token count "
        "(vllm-project/vllm#47407).",
        expected="every position below the number of table rows",
        fix=("lower the sequence length or the video length", "or a longer table / rope scaling"),
    ),
    Symptom(
        code="table-too-short",
        pattern=r"max_model_len \(?\d+\)? is greater than the derived max_model_len",
        cause="vLLM derives the longest sequence from the rotary config and refuses more.",
        expected="max_model_len within the rotary table",
        fix=("lower max_model_len", "or rope scaling (YaRN) through hf_overrides"),
    ),
    Symptom(
        code="kv-heads-tp",
        pattern=r"num_query_groups \(\d+\) must be a multiple or divisor of",
        cause="The key/value heads can neither be split evenly over the tensor-parallel ranks nor be shared evenly.",
        expected="a tensor parallel size that divides or is divided by num_query_groups",
        fix=("change tensor_model_parallel_size",),
    ),
    Symptom(
        code="rope-fusion-with-dsa",
        pattern=r"RoPE fusion is not supported for DSAttention",
        cause="Megatron Core asserts that RoPE fusion is off for DSAttention.",
        expected="apply_rope_fusion=False",
        fix=("apply_rope_fusion=False",),
    ),
    Symptom(
        code="mla-fusion-needs-yarn",
        pattern=r"apply_rope_fusion for MLA only works with YARN RoPE",
        cause="Megatron Core's fused MLA rotation works with YaRN only.",
        expected="rope_type=yarn, or apply_rope_fusion=False",
        fix=("apply_rope_fusion=False",),
    ),
    Symptom(
        code="rope-fusion-unavailable",
        pattern=r"apply_rope_fusion is not available",
        cause="apply_rope_fusion needs TransformerEngine 1.4 or newer, which does not exist on an NPU.",
        expected="TransformerEngine installed, or apply_rope_fusion=False",
        fix=("apply_rope_fusion=False (--no-rope-fusion)", "or install transformer-engine"),
    ),
    Symptom(
        code="yarn-factor-ignored",
        pattern=r"mscale=\S+ is not supported by TE's fused RoPE",
        cause="TransformerEngine's kernel cannot multiply by mscale; Megatron runs the unfused code, which does.",
        expected="nothing: the result is right, only slower",
        fix=("apply_rope_fusion=False silences it",),
        severity="note",
    ),
    Symptom(
        code="low-precision-angles",
        pattern=r"cos_sin_cache should be float32",
        cause="FlashInfer takes a float32 table; this one was cast to the model's dtype.",
        expected="a float32 cos/sin table",
        fix=("keep the table in float32: do not call .to(bfloat16) on the whole model",),
    ),
    Symptom(
        code="operator-limit",
        pattern=r"please do not use RotaryPositionEmbedding fusion operator",
        cause="npu_rotary_mul in BNSD with a large B*N or a head size that is not 32-byte aligned "
        "(modelscope/ms-swift#9329).",
        expected="BSND or SBND, or plain torch",
        fix=("transpose q and k to BSND before the call", "or use plain torch for this shape"),
    ),
)


def explain(text: str, where: str) -> list[Finding]:
    """What a traceback or log says about the rotary path: one finding per cause, or a note that none is known."""
    findings = []
    for symptom in SYMPTOMS:
        match = re.search(symptom.pattern, text)
        if match is None:
            continue
        line = text.count("\n", 0, match.end()) + 1
        findings.append(
            Finding(
                code=symptom.code,
                severity=symptom.severity,
                where=f"{where}:{line}",
                found=_line(text, match.end()),
                expected=symptom.expected,
                why=symptom.cause,
                fix=symptom.fix,
            )
        )
    return findings or [_unknown(text, where)]


def _line(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position - 1) + 1
    end = text.find("\n", position)
    return text[start : end if end != -1 else None].strip()[:300]


def _unknown(text: str, where: str) -> Finding:
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return Finding(
        code="log-not-recognised",
        severity="note",
        where=where,
        found=last[:300] or "an empty log",
        expected="one of the rotary failures listed in docs/doctor.md",
        why="No known rotary failure stands in this text; the cause may lie elsewhere.",
        fix=("run `whorl doctor` on the configuration itself",),
    )
