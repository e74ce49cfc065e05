"""Which rotary operator will run: one function per framework, each ending in a `RotaryPath`."""

from collections.abc import Callable
from typing import Final

from whorl.doctor.inputs import BadInput
from whorl.doctor.report import RotaryPath
from whorl.doctor.setup import Setup

# How each operator is called, by the name that contracts and traces share. Those of CONTRACTS are the vendor's.
CALLS: Final = {
    "torch": "x*cos + rotate(x)*sin in plain torch (cat, neg, mul), q and k apart",
    "inductor": "x*cos + rotate(x)*sin in plain torch, compiled by Inductor into one kernel",
    "torch_complex": "torch.view_as_complex(x) * freqs, float32",
    "te_fused_rope": "TransformerEngine fused_apply_rotary_pos_emb, q and k apart",
    "te_fused_rope_thd": "TransformerEngine fused_apply_rotary_pos_emb_thd, q and k apart",
    "vllm_rotary_embedding": "torch.ops._C.rotary_embedding(positions, q, k, ...), in place",
    "triton_mrope": "vLLM triton_mrope(q, k, cos, sin, mrope_section, ...), in place",
    "triton_rope": "vllm-ascend's Triton rotary kernel: gathers by position, q and k in one launch, in place",
    "whorl": "whorl::rope or whorl::mrope, q and k in one launch",
    "npu_mrope": "torch_npu.npu_mrope(positions, q, k, cos_sin_cache, head_size, ...)",
    "npu_rotary_mul": "torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode), once for q and once for k",
    "npu_interleave_rope": "torch_npu.npu_interleave_rope(x, cos, sin)",
    "npu_apply_rotary_pos_emb": "torch_npu.npu_apply_rotary_pos_emb(q, k, cos, sin, layout, rotary_mode), in place",
    "_npu_rotary_embedding": "torch_npu._npu_rotary_embedding(positions, q, k, ...) of ATB, in place",
    "npu_rotary_position_embedding": "mindspeed.ops.npu_rotary_position_embedding(x, cos, sin, mode), q and k apart",
}
VLLM_ASCEND_MROPE_SECTIONS: Final = (16, 24, 24)  # the one section vllm-ascend hands to npu_mrope
ATB_UNTIL: Final = (0, 11)  # vllm-ascend 0.10 calls ATB by default
Reasons = tuple[tuple[str, str], ...]


def predict(setup: Setup) -> RotaryPath:
    """The rotary path of one part of a launch."""
    forced = setup.get("rotary_operator")
    if forced is None:
        return PATHS[setup.framework](setup)
    if forced not in CALLS:
        raise BadInput(f"rotary_operator={forced!r}: choose one of {', '.join(CALLS)}")
    return _path(
        setup, "your own attention code", str(forced), f"rotary_operator is set in {setup.where('rotary_operator')}"
    )


def branch_of(setup: Setup) -> tuple[str, str]:
    """Megatron's position_embedding_type and why it has that value."""
    setting = setup.find("position_embedding_type")
    if setting is not None:
        return str(setting.value), f"position_embedding_type={setting.value} in {setting.where}"
    if setup.on("use_rotary_position_embeddings"):
        return "rope", f"use_rotary_position_embeddings in {setup.where('use_rotary_position_embeddings')}"
    wanted = "mrope" if setup.is_mrope else "rope"
    return wanted, f"position_embedding_type is not set; taken to be {wanted}, as the model needs"


def is_packed(setup: Setup) -> bool:
    """Sequences packed into THD rather than a padded batch."""
    return any(
        setup.on(key) for key in ("packed_sequence", "use_packed_sequence", "sequence_packing", "use_remove_padding")
    ) or (setup.get("qkv_format") == "thd")


def has_triton_ascend(setup: Setup) -> bool:
    """vllm-ascend uses its Triton kernels where triton-ascend is installed; taken as installed if nothing says."""
    return setup.has("triton_ascend") is not False


def _path(setup: Setup, branch: str, operator: str, because: str, passed_over: Reasons = ()) -> RotaryPath:
    framework = "vllm-ascend" if setup.framework == "vllm" and setup.device == "npu" else setup.framework
    return RotaryPath(
        role="train" if setup.train else "infer",
        runs_in=setup.scope or framework,
        branch=branch,
        operator=operator,
        call=CALLS[operator],
        style=setup.style,
        layout=setup.layout,
        device=setup.device,
        because=because,
        passed_over=passed_over,
    )


def _megatron(setup: Setup) -> RotaryPath:
    branch, because = branch_of(setup)
    if setup.is_mrope and branch != "mrope" and setup.uses_bridge:
        because += "; never reached, GPTModel._preprocess fails before the decoder"
    if setup.is_mla:
        return _path(
            setup,
            "multi-latent attention",
            "torch",
            "MLA rotates inside its own attention; the branches of GPTModel are skipped",
        )
    if setup.device == "npu":
        return _mindspeed_branch(setup, branch, because)
    if branch == "mrope" and setup.uses_bridge:
        reason = "Bridge's apply_rotary_pos_emb_absolute asserts that it is off for MRoPE"
        return _path(setup, branch, "torch", because, (("te_fused_rope", reason),))
    fused = "te_fused_rope_thd" if is_packed(setup) else "te_fused_rope"
    refusal = _te_refusal(setup, branch)
    if refusal is None:
        return _path(setup, branch, fused, f"{because}; apply_rope_fusion is on")
    return _path(setup, branch, "torch", because, ((fused, refusal),))


def fusion_on(setup: Setup, branch: str) -> bool:
    """apply_rope_fusion in effect. Megatron-LM's own arguments turn it on by default, for the rope branch alone."""
    value = setup.get("apply_rope_fusion")
    by_default = setup.framework != "bridge" and branch == "rope" and bool(setup.all("position_embedding_type"))
    return by_default if value is None else value is True


def _te_refusal(setup: Setup, branch: str) -> str | None:
    if not fusion_on(setup, branch):
        return f"apply_rope_fusion is off ({setup.where('apply_rope_fusion')})"
    if branch == "mrope" and not is_packed(setup) and (setup.number("micro_batch_size") or 1) > 1:
        return "MRoPE in BSHD with a batch above 1 falls back to the unfused code"
    if branch == "yarn" and setup.rope and setup.rope.attention_factor != 1.0:
        return f"mscale {setup.rope.attention_factor:.4g} is not 1, which TransformerEngine's kernel cannot apply"
    return None


def _mindspeed_branch(setup: Setup, branch: str, because: str) -> RotaryPath:
    fused = "npu_rotary_position_embedding"
    te = ("te_fused_rope", "TransformerEngine does not run on an NPU")
    if branch == "rope" and setup.on("use_fused_rotary_pos_emb"):
        return _path(setup, branch, fused, f"{because}; use_fused_rotary_pos_emb is on", (te,))
    if branch == "rope":
        return _path(setup, branch, "torch", because, ((fused, "use_fused_rotary_pos_emb is off"), te))
    passed = (
        (fused, f"MindSpeed's fused RoPE serves the rope branch, not {branch}"),
        ("npu_mrope", "no switch turns it on: it is attached where q and k are rotated, and it has no gradient"),
        te,
    )
    return _path(setup, branch, "torch", because, passed)


def _mindspeed_mm(setup: Setup) -> RotaryPath:
    because = "MindSpeed-MM's FSDP models merge the position axes in Python and rotate with npu_rotary_mul"
    if setup.device != "npu":
        return _path(setup, "model file", "torch", "no NPU: the same model file uses plain torch")
    passed = (("npu_mrope", "it has no gradient; MindSpeed-MM does not call it in training"),)
    return _path(setup, "model file", "npu_rotary_mul", because, passed)


def _hf(setup: Setup) -> RotaryPath:
    if setup.device == "npu" and setup.scope == "verl actor":
        return _path(setup, "model file", "npu_rotary_mul", "verl's npu_patch replaces apply_rotary_pos_emb")
    because = "transformers computes cos and sin in float32, casts them to the model's dtype and rotates in torch"
    passed = (
        (("npu_rotary_mul", "transformers calls no fused rotary operator on an NPU by itself"),)
        if setup.device == "npu"
        else ()
    )
    return _path(setup, "model file", "torch", because, passed)


def _torchtitan(setup: Setup) -> RotaryPath:
    if (setup.text or {}).get("model_type") == "llama":
        because = (
            "torchtitan keeps Llama's q and k in Meta's order of adjacent pairs; its checkpoint adapter permutes them"
        )
        return _path(setup, "ComplexRoPE", "torch_complex", because)
    if setup.style == "pairs":
        return _path(setup, "ComplexRoPE", "torch_complex", "adjacent pairs: torchtitan multiplies complex numbers")
    return _path(setup, "CosSinRoPE", "torch", "half style: torchtitan uses a cos/sin cache of width 2*dim")


def _vllm(setup: Setup) -> RotaryPath:
    if setup.device == "npu":
        return _vllm_ascend(setup)
    branch = vllm_class(setup)
    if not setup.on("enforce_eager"):
        custom = "vllm_rotary_embedding" if not setup.is_mrope else "triton_mrope"
        passed = ((custom, "custom_ops is 'none' by default when Inductor compiles"),)
        return _path(setup, branch, "inductor", "torch.compile is on (enforce_eager is not set)", passed)
    operator = "triton_mrope" if setup.is_mrope else "vllm_rotary_embedding"
    return _path(setup, branch, operator, "enforce_eager is set, so vLLM's own kernel runs")


VLLM_CLASSES: Final = {
    "default": "RotaryEmbedding",
    "llama3": "Llama3RotaryEmbedding",
    "linear": "LinearScalingRotaryEmbedding",
    "yarn": "YaRNScalingRotaryEmbedding",
    "deepseek_yarn": "DeepseekScalingRotaryEmbedding",
    "longrope": "Phi3LongRoPEScaledRotaryEmbedding",
    "proportional": "Gemma4RotaryEmbedding",
    "xdrope": "XDRotaryEmbedding",
}
VLLM_ASCEND_REPLACES: Final = ("RotaryEmbedding", "YaRNScalingRotaryEmbedding", "DeepseekScalingRotaryEmbedding")


def vllm_class(setup: Setup) -> str:
    """The class vLLM's get_rope picks, as far as the config decides it."""
    kind = setup.rope.rope_type if setup.rope else "default"
    if setup.is_mrope and kind != "xdrope":
        return "MRotaryEmbedding"
    return VLLM_CLASSES.get(kind, f"class for rope_type {kind!r}")


def _vllm_ascend(setup: Setup) -> RotaryPath:
    version, branch = setup.version("vllm_ascend"), vllm_class(setup)
    if setup.is_mla:
        because = "MLA gets cos and sin through its metadata (npu_kv_rmsnorm_rope_cache for the key)"
        return _path(setup, "MLA", "npu_interleave_rope", because)
    if _is_310p(setup):
        return _vllm_ascend_310p(setup, branch)
    if branch == "MRotaryEmbedding":
        return _vllm_ascend_mrope(setup)
    if version is not None and version < ATB_UNTIL:
        because = f"vllm-ascend {'.'.join(map(str, version))} calls ATB for every RotaryEmbedding"
        return _path(setup, branch, "_npu_rotary_embedding", because)
    if branch not in VLLM_ASCEND_REPLACES:
        return _path(setup, branch, "torch", f"vllm-ascend does not replace {branch}: its native forward runs")
    if has_triton_ascend(setup):
        passed = (("npu_mrope", "used only without triton-ascend"),)
        return _path(setup, branch, "triton_rope", "triton-ascend is installed, or nothing says otherwise", passed)
    passed = (("triton_rope", "triton-ascend is not among the packages"),)
    return _path(setup, branch, "npu_mrope", "no triton-ascend: npu_mrope with mrope_section=[0, 0, 0]", passed)


def _is_310p(setup: Setup) -> bool:
    soc = setup.environment("SOC_VERSION")
    return "310p" in str(soc.value if soc else setup.get("soc_version", "")).lower()


def _vllm_ascend_310p(setup: Setup, branch: str) -> RotaryPath:
    rotary = setup.rope.rotary_dim if setup.rope else 128
    if setup.is_mrope or rotary not in (64, 128):
        return _path(setup, branch, "torch", f"Atlas 310P with rotary size {rotary}: plain torch")
    because = "Atlas 310P: cos and sin are sliced once per step and every layer applies them"
    return _path(setup, branch, "npu_apply_rotary_pos_emb", because)


def _vllm_ascend_mrope(setup: Setup) -> RotaryPath:
    branch, sections = "MRotaryEmbedding", list(setup.sections or ())
    if setup.layout == "interleaved" and has_triton_ascend(setup):
        passed = (("npu_mrope", "Triton is preferred for interleaved sections"),)
        return _path(setup, branch, "triton_mrope", "interleaved sections and triton-ascend", passed)
    if setup.sections == VLLM_ASCEND_MROPE_SECTIONS:
        return _path(setup, branch, "npu_mrope", f"mrope_section is {sections}")
    gate = f"vllm-ascend calls it for mrope_section {list(VLLM_ASCEND_MROPE_SECTIONS)} alone"
    return _path(setup, branch, "torch", f"mrope_section is {sections}", (("npu_mrope", gate),))


PATHS: Final[dict[str, Callable[[Setup], RotaryPath]]] = {
    "megatron": _megatron,
    "bridge": _megatron,
    "mindspeed": _megatron,
    "mindspeed-mm": _mindspeed_mm,
    "vllm": _vllm,
    "hf": _hf,
    "torchtitan": _torchtitan,
}
