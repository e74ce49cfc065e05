"""Predict which rotary operator will run: one function per framework, each returns a `RotaryPath`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from whorl.doctor import own_engine, vllm_paths
from whorl.doctor.launch import Launch
from whorl.doctor.report import RotaryPath
from whorl.doctor.rotary_operators import OPERATORS, make_path
from whorl.doctor.settings import BadInput


def predict(launch: Launch) -> RotaryPath:
    """Return the rotary path of one part of a launch; raises BadInput for an unknown rotary_operator."""
    forced = launch.get("rotary_operator")
    if forced is None:
        return PATHS[launch.framework](launch)
    if forced not in OPERATORS:
        raise BadInput(f"rotary_operator={forced!r}: choose one of {', '.join(OPERATORS)}")
    because = f"rotary_operator is set in {launch.where('rotary_operator')}"
    return make_path(launch, "your own attention code", str(forced), because)


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
        return make_path(launch, branch, "torch", because, (("te_fused_rope", reason),))
    fused = "te_fused_rope_thd" if is_packed(launch) else "te_fused_rope"
    refusal = _te_refusal(launch, branch)
    if refusal is None:
        passed = (("torch", "runs only where apply_rope_fusion is off or not supported"),)
        return make_path(launch, branch, fused, f"{because}; apply_rope_fusion is on", passed)
    return make_path(launch, branch, "torch", because, ((fused, refusal),))


def _megatron_mla(launch: Launch) -> RotaryPath:
    branch, because = "multi-latent attention", "MLA rotates inside its attention; GPTModel's branches are skipped"
    on_npu = launch.device == "npu"
    fused = "npu_rotary_position_embedding" if on_npu else "mla_fused_rope"
    switch = "use_fused_rotary_pos_emb" if on_npu else "apply_rope_fusion"
    if launch.on(switch):
        return make_path(
            launch, branch, fused, f"{because}; {switch} is on", (("torch", f"runs where {switch} is off"),)
        )
    return make_path(launch, branch, "torch", because, ((fused, f"{switch} is off"),))


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
        return make_path(launch, branch, fused, f"{because}; use_fused_rotary_pos_emb is on", (te,))
    if branch == "rope":
        return make_path(launch, branch, "torch", because, ((fused, "use_fused_rotary_pos_emb is off"), te))
    passed = (
        (fused, f"MindSpeed's fused RoPE supports the rope branch, not {branch}"),
        ("npu_mrope", "no switch turns it on: an adapter has to call it, and it has no gradient"),
        te,
    )
    return make_path(launch, branch, "torch", because, passed)


def _mindspeed_mm(launch: Launch) -> RotaryPath:
    because = "MindSpeed-MM's FSDP models merge the position axes in Python and rotate with npu_rotary_mul"
    if launch.device != "npu":
        passed = (("npu_rotary_mul", "no NPU"),)
        return make_path(launch, "model file", "torch", "without an NPU the same model file uses plain torch", passed)
    passed = (("npu_mrope", "it has no gradient; MindSpeed-MM does not call it in training"),)
    return make_path(launch, "model file", "npu_rotary_mul", because, passed)


def _hf(launch: Launch) -> RotaryPath:
    fused = "npu_rotary_mul" if launch.device == "npu" else "whorl"
    if launch.device == "npu" and launch.scope == "verl actor":
        passed = (("torch", "replaced by the patch"),)
        return make_path(launch, "model file", fused, "verl's npu_patch replaces apply_rotary_pos_emb", passed)
    because = "transformers computes cos and sin in float32, casts them to the model's dtype and rotates in torch"
    passed = ((fused, "transformers calls no fused rotary operator itself; an adapter must install one"),)
    return make_path(launch, "model file", "torch", because, passed)


def _torchtitan(launch: Launch) -> RotaryPath:
    if launch.style == "half" and (launch.text or {}).get("model_type") != "llama":
        passed = (("torch_complex", "ComplexRoPE is for adjacent pairs"),)
        because = "half style: torchtitan uses a cos/sin cache of width 2*dim"
        return make_path(launch, "CosSinRoPE", "torch", because, passed)
    because = "adjacent pairs: torchtitan multiplies complex numbers"
    if launch.style == "half":
        because += "; it keeps Llama in Meta's channel order, and its checkpoint adapter permutes q and k"
    return make_path(launch, "ComplexRoPE", "torch_complex", because, (("torch", "CosSinRoPE is for half style"),))


def predict_tower(launch: Launch) -> RotaryPath | None:
    """Return the rotary path of the vision tower where whorl's own engine runs it, else None."""
    tower = own_engine.predict_tower(launch) if launch.framework == "whorl" else None
    return None if tower is None else replace(make_path(launch, *tower), style="half", layout=None)


PATHS: Final[dict[str, Callable[[Launch], RotaryPath]]] = {
    "megatron": _megatron,
    "bridge": _megatron,
    "mindspeed": _megatron,
    "mindspeed-mm": _mindspeed_mm,
    "vllm": vllm_paths.predict,
    "hf": _hf,
    "torchtitan": _torchtitan,
    "whorl": lambda launch: make_path(launch, *own_engine.predict_text(launch)),
}
