"""Predict which rotary operator will run: one function per framework, each returns a `RotaryPath`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from whorl.doctor import own_engine
from whorl.doctor.launch import Launch
from whorl.doctor.report import RotaryPath
from whorl.doctor.settings import BadInput


class Operator(NamedTuple):
    """The library that an operator belongs to, and how it is called."""

    backend: str
    call: str


# By the operator's name: the same names are the keys of whorl.contracts and the values of trace.EVIDENCE.
OPERATORS: Final = {
    "torch": Operator("torch", "x*cos + rotate(x)*sin in plain torch (cat, neg, mul), q and k separately"),
    "inductor": Operator("triton", "x*cos + rotate(x)*sin in plain torch, compiled by Inductor into one kernel"),
    "torch_complex": Operator("torch", "torch.view_as_complex(x) * freqs, float32"),
    "te_fused_rope": Operator("transformer_engine", "TransformerEngine fused_apply_rotary_pos_emb, q and k separately"),
    "te_fused_rope_thd": Operator(
        "transformer_engine", "TransformerEngine fused_apply_rotary_pos_emb_thd, q and k separately"
    ),
    "mla_fused_rope": Operator("triton", "Megatron Core fused_apply_mla_rope_for_q and _for_kv (Triton, YaRN only)"),
    "vllm_rotary_embedding": Operator("vllm", "torch.ops._C.rotary_embedding(positions, q, k, ...), in place"),
    "triton_mrope": Operator("triton", "vLLM triton_mrope(q, k, cos, sin, mrope_section, ...), in place"),
    "triton_rope": Operator(
        "triton", "vllm-ascend's Triton rotary kernel: gathers by position, q and k in one launch, in place"
    ),
    "whorl": Operator("whorl", "whorl::rope or whorl::mrope, q and k in one launch"),
    "npu_mrope": Operator("torch_npu", "torch_npu.npu_mrope(positions, q, k, cos_sin_cache, head_size, ...)"),
    "npu_rotary_mul": Operator("torch_npu", "torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode), q and k separately"),
    "npu_interleave_rope": Operator("torch_npu", "torch_npu.npu_interleave_rope(x, cos, sin)"),
    "npu_apply_rotary_pos_emb": Operator(
        "torch_npu", "torch_npu.npu_apply_rotary_pos_emb(q, k, cos, sin, layout, rotary_mode), in place"
    ),
    "_npu_rotary_embedding": Operator(
        "torch_npu", "torch_npu._npu_rotary_embedding(positions, q, k, ...) of ATB, in place"
    ),
    "npu_rotary_position_embedding": Operator(
        "mindspeed", "mindspeed.ops.npu_rotary_position_embedding(x, cos, sin, mode), q and k separately"
    ),
}
VLLM_ASCEND_MROPE_SECTIONS: Final = (16, 24, 24)  # the only sections that vllm-ascend passes to npu_mrope
ATB_UNTIL: Final = (0, 11)  # vllm-ascend before 0.11 calls ATB by default
Reasons = tuple[tuple[str, str], ...]  # operators that are not chosen, each with the reason


def predict(launch: Launch) -> RotaryPath:
    """Return the rotary path of one part of a launch; raises BadInput for an unknown rotary_operator."""
    forced = launch.get("rotary_operator")
    if forced is None:
        return PATHS[launch.framework](launch)
    if forced not in OPERATORS:
        raise BadInput(f"rotary_operator={forced!r}: choose one of {', '.join(OPERATORS)}")
    because = f"rotary_operator is set in {launch.where('rotary_operator')}"
    return _path(launch, "your own attention code", str(forced), because)


def megatron_branch(launch: Launch) -> tuple[str, str]:
    """Return Megatron's position_embedding_type and why it has that value."""
    setting = launch.find("position_embedding_type")
    if setting is not None:
        return str(setting.value), f"position_embedding_type={setting.value} in {setting.where}"
    if launch.on("use_rotary_position_embeddings"):
        return "rope", f"use_rotary_position_embeddings in {launch.where('use_rotary_position_embeddings')}"
    branch = "mrope" if launch.is_mrope else "rope"
    return branch, f"position_embedding_type is not set; assumed to be {branch}, which the model needs"


def is_packed(launch: Launch) -> bool:
    """Return whether sequences are packed into THD instead of a padded batch."""
    switches = ("packed_sequence", "use_packed_sequence", "sequence_packing", "use_remove_padding")
    return any(launch.on(key) for key in switches) or launch.get("qkv_format") == "thd"


def has_triton_ascend(launch: Launch) -> bool:
    """Return whether vllm-ascend uses its Triton kernels: yes, unless a file lists packages without triton-ascend."""
    return launch.has("triton_ascend") is not False


def _path(launch: Launch, branch: str, operator: str, because: str, passed_over: Reasons = ()) -> RotaryPath:
    framework = "vllm-ascend" if launch.framework == "vllm" and launch.device == "npu" else launch.framework
    return RotaryPath(
        role="train" if launch.train else "infer",
        runs_in=launch.scope or framework,
        branch=branch,
        operator=operator,
        backend=OPERATORS[operator].backend,
        call=OPERATORS[operator].call,
        style=launch.style,
        layout=launch.layout,
        device=launch.device,
        because=because,
        passed_over=passed_over,
    )


def _megatron(launch: Launch) -> RotaryPath:
    branch, because = megatron_branch(launch)
    if launch.is_mrope and branch != "mrope" and launch.uses_bridge:
        because += "; the decoder is never reached, because GPTModel._preprocess fails first"
    if launch.is_mla:
        return _megatron_mla(launch)
    if launch.device == "npu":
        return _mindspeed_branch(launch, branch, because)
    if branch == "mrope" and launch.uses_bridge:
        reason = "Bridge's apply_rotary_pos_emb_absolute asserts that it is off for MRoPE"
        return _path(launch, branch, "torch", because, (("te_fused_rope", reason),))
    fused = "te_fused_rope_thd" if is_packed(launch) else "te_fused_rope"
    refusal = _te_refusal(launch, branch)
    if refusal is None:
        passed = (("torch", "runs only where apply_rope_fusion is off or not supported"),)
        return _path(launch, branch, fused, f"{because}; apply_rope_fusion is on", passed)
    return _path(launch, branch, "torch", because, ((fused, refusal),))


def _megatron_mla(launch: Launch) -> RotaryPath:
    branch, because = "multi-latent attention", "MLA rotates inside its attention; GPTModel's branches are skipped"
    on_npu = launch.device == "npu"
    fused = "npu_rotary_position_embedding" if on_npu else "mla_fused_rope"
    switch = "use_fused_rotary_pos_emb" if on_npu else "apply_rope_fusion"
    if launch.on(switch):
        return _path(launch, branch, fused, f"{because}; {switch} is on", (("torch", f"runs where {switch} is off"),))
    return _path(launch, branch, "torch", because, ((fused, f"{switch} is off"),))


def is_fusion_on(launch: Launch, branch: str) -> bool:
    """Return whether apply_rope_fusion is on. Megatron-LM turns it on by default, only for the rope branch."""
    value = launch.get("apply_rope_fusion")
    by_default = launch.framework != "bridge" and branch == "rope" and bool(launch.find_all("position_embedding_type"))
    return by_default if value is None else value is True


def _te_refusal(launch: Launch, branch: str) -> str | None:
    """Return why TransformerEngine's fused kernel does not run, or None if it does."""
    if not is_fusion_on(launch, branch):
        return f"apply_rope_fusion is off ({launch.where('apply_rope_fusion')})"
    if branch == "mrope" and not is_packed(launch) and (launch.number("micro_batch_size") or 1) > 1:
        return "MRoPE in BSHD with a batch above 1 falls back to the unfused code"
    if branch == "yarn" and launch.rope and launch.rope.attention_factor != 1.0:
        return f"mscale {launch.rope.attention_factor:.4g} is not 1, which TransformerEngine's kernel cannot apply"
    return None


def _mindspeed_branch(launch: Launch, branch: str, because: str) -> RotaryPath:
    fused = "npu_rotary_position_embedding"
    te = ("te_fused_rope", "TransformerEngine does not run on an NPU")
    if branch == "rope" and launch.on("use_fused_rotary_pos_emb"):
        return _path(launch, branch, fused, f"{because}; use_fused_rotary_pos_emb is on", (te,))
    if branch == "rope":
        return _path(launch, branch, "torch", because, ((fused, "use_fused_rotary_pos_emb is off"), te))
    passed = (
        (fused, f"MindSpeed's fused RoPE supports the rope branch, not {branch}"),
        ("npu_mrope", "no switch turns it on: an adapter has to call it, and it has no gradient"),
        te,
    )
    return _path(launch, branch, "torch", because, passed)


def _mindspeed_mm(launch: Launch) -> RotaryPath:
    because = "MindSpeed-MM's FSDP models merge the position axes in Python and rotate with npu_rotary_mul"
    if launch.device != "npu":
        passed = (("npu_rotary_mul", "no NPU"),)
        return _path(launch, "model file", "torch", "without an NPU the same model file uses plain torch", passed)
    passed = (("npu_mrope", "it has no gradient; MindSpeed-MM does not call it in training"),)
    return _path(launch, "model file", "npu_rotary_mul", because, passed)


def _hf(launch: Launch) -> RotaryPath:
    fused = "npu_rotary_mul" if launch.device == "npu" else "whorl"
    if launch.device == "npu" and launch.scope == "verl actor":
        passed = (("torch", "replaced by the patch"),)
        return _path(launch, "model file", fused, "verl's npu_patch replaces apply_rotary_pos_emb", passed)
    because = "transformers computes cos and sin in float32, casts them to the model's dtype and rotates in torch"
    passed = ((fused, "transformers calls no fused rotary operator itself; an adapter must install one"),)
    return _path(launch, "model file", "torch", because, passed)


def _torchtitan(launch: Launch) -> RotaryPath:
    if launch.style == "half" and (launch.text or {}).get("model_type") != "llama":
        passed = (("torch_complex", "ComplexRoPE is for adjacent pairs"),)
        because = "half style: torchtitan uses a cos/sin cache of width 2*dim"
        return _path(launch, "CosSinRoPE", "torch", because, passed)
    because = "adjacent pairs: torchtitan multiplies complex numbers"
    if launch.style == "half":
        because += "; it keeps Llama in Meta's channel order, and its checkpoint adapter permutes q and k"
    return _path(launch, "ComplexRoPE", "torch_complex", because, (("torch", "CosSinRoPE is for half style"),))


def _vllm(launch: Launch) -> RotaryPath:
    if launch.device == "npu":
        return _vllm_ascend(launch)
    branch = vllm_class(launch)
    if not launch.on("enforce_eager"):
        custom = "vllm_rotary_embedding" if not launch.is_mrope else "triton_mrope"
        passed = ((custom, "custom_ops is 'none' by default when Inductor compiles"),)
        return _path(launch, branch, "inductor", "torch.compile is on (enforce_eager is not set)", passed)
    operator = "triton_mrope" if launch.is_mrope else "vllm_rotary_embedding"
    passed = (("inductor", "enforce_eager turns torch.compile off"),)
    return _path(launch, branch, operator, "enforce_eager is set, so vLLM's own kernel runs", passed)


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


def vllm_class(launch: Launch) -> str:
    """Return the class that vLLM's get_rope picks, as far as the config decides it."""
    kind = launch.rope.rope_type if launch.rope else "default"
    if launch.rope and launch.rope.is_dual_chunk:
        return "DualChunkRotaryEmbedding"
    if launch.is_mrope and kind != "xdrope":
        return "MRotaryEmbedding"
    return VLLM_CLASSES.get(kind, f"class for rope_type {kind!r}")


def _vllm_ascend(launch: Launch) -> RotaryPath:
    version, branch = launch.version("vllm_ascend"), vllm_class(launch)
    if launch.is_mla:
        because = "MLA gets cos and sin through the attention metadata (npu_kv_rmsnorm_rope_cache rotates the key)"
        passed = (("npu_mrope", "is called for RotaryEmbedding and MRotaryEmbedding, not for MLA"),)
        return _path(launch, "MLA", "npu_interleave_rope", because, passed)
    if _is_310p(launch):
        return _vllm_ascend_310p(launch, branch)
    if branch == "MRotaryEmbedding":
        return _vllm_ascend_mrope(launch)
    if version is not None and version < ATB_UNTIL:
        because = f"vllm-ascend {'.'.join(map(str, version))} calls ATB for every RotaryEmbedding"
        return _path(launch, branch, "_npu_rotary_embedding", because, (("npu_mrope", "not called by this version"),))
    if branch not in VLLM_ASCEND_REPLACES:
        passed = (("triton_rope", f"is called for {', '.join(VLLM_ASCEND_REPLACES)}"),)
        return _path(launch, branch, "torch", f"vllm-ascend does not replace {branch}: its native forward runs", passed)
    if has_triton_ascend(launch):
        passed = (("npu_mrope", "used only without triton-ascend"),)
        because = "triton-ascend is installed, or assumed to be where no file lists packages"
        return _path(launch, branch, "triton_rope", because, passed)
    passed = (("triton_rope", "triton-ascend is not among the packages"),)
    because = "without triton-ascend npu_mrope runs, with mrope_section=[0, 0, 0]"
    return _path(launch, branch, "npu_mrope", because, passed)


def _is_310p(launch: Launch) -> bool:
    soc = launch.environment("SOC_VERSION")
    return "310p" in str(soc.value if soc else launch.get("soc_version", "")).lower()


def _vllm_ascend_310p(launch: Launch, branch: str) -> RotaryPath:
    rotary = launch.rope.rotary_dim if launch.rope else 128
    fused = "npu_apply_rotary_pos_emb"
    if launch.is_mrope or rotary not in (64, 128):
        passed = ((fused, "supports plain RoPE with rotary size 64 or 128"),)
        return _path(launch, branch, "torch", f"Atlas 310P with rotary size {rotary}: plain torch", passed)
    because = "Atlas 310P: cos and sin are sliced once per step and every layer applies them"
    return _path(launch, branch, fused, because, (("triton_rope", "not used on Atlas 310P"),))


def _vllm_ascend_mrope(launch: Launch) -> RotaryPath:
    branch, sections = "MRotaryEmbedding", list(launch.sections or ())
    if launch.layout == "interleaved" and has_triton_ascend(launch):
        passed = (("npu_mrope", "Triton is preferred for interleaved sections"),)
        return _path(launch, branch, "triton_mrope", "interleaved sections and triton-ascend", passed)
    if launch.sections == VLLM_ASCEND_MROPE_SECTIONS:
        passed = (("triton_mrope", "used only for interleaved sections, where triton-ascend is installed"),)
        return _path(launch, branch, "npu_mrope", f"mrope_section is {sections}", passed)
    gate = f"vllm-ascend calls it only for mrope_section {list(VLLM_ASCEND_MROPE_SECTIONS)}"
    return _path(launch, branch, "torch", f"mrope_section is {sections}", (("npu_mrope", gate),))


def predict_tower(launch: Launch) -> RotaryPath | None:
    """Return the rotary path of the vision tower where whorl's own engine runs it, else None."""
    tower = own_engine.predict_tower(launch) if launch.framework == "whorl" else None
    return None if tower is None else replace(_path(launch, *tower), style="half", layout=None)


PATHS: Final[dict[str, Callable[[Launch], RotaryPath]]] = {
    "megatron": _megatron,
    "bridge": _megatron,
    "mindspeed": _megatron,
    "mindspeed-mm": _mindspeed_mm,
    "vllm": _vllm,
    "hf": _hf,
    "torchtitan": _torchtitan,
    "whorl": lambda launch: _path(launch, *own_engine.predict_text(launch)),
}
