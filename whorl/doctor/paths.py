"""Predict which rotary operator will run: one function per framework, each returns a `Prediction`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from whorl import contracts
from whorl.doctor import sglang_paths, vllm_paths
from whorl.doctor.launch import Launch
from whorl.doctor.report import Prediction, RotaryPath
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
    "sglang_rope": Operator("sglang", "SGLang apply_rope_with_cos_sin_cache_inplace(positions, q, k, ...), in place"),
    "sglang_mrope": Operator("triton", "SGLang triton_mrope_fused(q, k, cos_sin_cache, positions, ...), in place"),
    "sglang_gated_rope": Operator(
        "triton", "SGLang fused_qk_gemma_rmsnorm_rope_gate: norms, rotation and output gate in one kernel"
    ),
    "ascend_rotary_embedding": Operator(
        "vllm_ascend", "torch.ops._C.rotary_embedding(positions, q, k, ...) of vllm-ascend (later _C_ascend)"
    ),
    "whorl": Operator("whorl", "whorl::rope, q and k in one launch"),
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


def predict(launch: Launch) -> RotaryPath:
    """Return the rotary path of one part of a launch; raises BadInput for an unknown rotary_operator."""
    forced = launch.get("rotary_operator")
    if forced is None:
        return _path(launch, *PATHS[launch.framework](launch))
    if forced not in OPERATORS:
        raise BadInput(f"rotary_operator={forced!r}: choose one of {', '.join(OPERATORS)}")
    because = f"rotary_operator is set in {launch.where('rotary_operator')}"
    return _path(launch, "your own attention code", str(forced), because)


def predict_tower(launch: Launch) -> RotaryPath | None:
    """Return the rotary path of the vision tower where whorl's own engine runs it, else None."""
    tower = _own_tower(launch) if launch.framework == "whorl" else None
    return None if tower is None else replace(_path(launch, *tower), style="half", layout=None)


def _path(launch: Launch, branch: str, operator: str, because: str, *passed_over: tuple[str, str]) -> RotaryPath:
    return RotaryPath(
        role="train" if launch.train else "infer",
        runs_in=launch.scope or ("vllm-ascend" if launch.on_ascend else launch.framework),
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


def is_packed(launch: Launch) -> bool:
    """Return whether sequences are packed into THD instead of a padded batch."""
    switches = ("packed_sequence", "use_packed_sequence", "sequence_packing", "use_remove_padding")
    return any(launch.on(key) for key in switches) or launch.get("qkv_format") == "thd"


def is_fusion_on(launch: Launch, branch: str) -> bool:
    """Return whether apply_rope_fusion is on. Megatron-LM turns it on by default, only for the rope branch."""
    value = launch.get("apply_rope_fusion")
    by_default = launch.framework != "bridge" and branch == "rope" and bool(launch.find_all("position_embedding_type"))
    return by_default if value is None else value is True


def _megatron(launch: Launch) -> Prediction:
    branch, because = launch.branch_and_reason
    if launch.is_mla:
        return _megatron_mla(launch)
    if launch.is_mrope and branch != "mrope" and launch.uses_bridge:
        because += "; the decoder is never reached, because GPTModel._preprocess fails first"
    if launch.device == "npu":
        return _mindspeed_branch(launch, branch, because)
    if branch == "mrope" and launch.uses_bridge:
        reason = "Bridge's apply_rotary_pos_emb_absolute asserts that it is off for MRoPE"
        return branch, "torch", because, ("te_fused_rope", reason)
    fused = "te_fused_rope_thd" if is_packed(launch) else "te_fused_rope"
    if (refusal := _te_refusal(launch, branch)) is not None:
        return branch, "torch", because, (fused, refusal)
    passed = ("torch", "runs only where apply_rope_fusion is off or not supported")
    return branch, fused, f"{because}; apply_rope_fusion is on", passed


def _megatron_mla(launch: Launch) -> Prediction:
    branch, because = "multi-latent attention", "MLA rotates inside its attention; GPTModel's branches are skipped"
    on_npu = launch.device == "npu"
    fused = "npu_rotary_position_embedding" if on_npu else "mla_fused_rope"
    switch = "use_fused_rotary_pos_emb" if on_npu else "apply_rope_fusion"
    if launch.on(switch):
        return branch, fused, f"{because}; {switch} is on", ("torch", f"runs where {switch} is off")
    return branch, "torch", because, (fused, f"{switch} is off")


def _te_refusal(launch: Launch, branch: str) -> str | None:
    """Return why TransformerEngine's fused kernel does not run, or None if it does."""
    if not is_fusion_on(launch, branch):
        return f"apply_rope_fusion is off ({launch.where('apply_rope_fusion')})"
    if branch == "mrope" and not is_packed(launch) and (launch.number("micro_batch_size") or 1) > 1:
        return "MRoPE in BSHD with a batch above 1 falls back to the unfused code"
    if branch == "yarn" and launch.rope and launch.rope.attention_factor != 1.0:
        return f"mscale {launch.rope.attention_factor:.4g} is not 1, which TransformerEngine's kernel cannot apply"
    return None


def _mindspeed_branch(launch: Launch, branch: str, because: str) -> Prediction:
    fused = "npu_rotary_position_embedding"
    te = ("te_fused_rope", "TransformerEngine does not run on an NPU")
    if branch == "rope" and launch.on("use_fused_rotary_pos_emb"):
        return branch, fused, f"{because}; use_fused_rotary_pos_emb is on", te
    if branch == "rope":
        return branch, "torch", because, (fused, "use_fused_rotary_pos_emb is off"), te
    refusal = (fused, f"MindSpeed's fused RoPE supports the rope branch, not {branch}")
    mrope = ("npu_mrope", "no switch turns it on: an adapter has to call it, and it has no gradient")
    return branch, "torch", because, refusal, mrope, te


def _mindspeed_mm(launch: Launch) -> Prediction:
    if launch.device != "npu":
        because = "without an NPU the same model file uses plain torch"
        return "model file", "torch", because, ("npu_rotary_mul", "no NPU")
    because = "MindSpeed-MM's FSDP models merge the position axes in Python and rotate with npu_rotary_mul"
    passed = ("npu_mrope", "it has no gradient; MindSpeed-MM does not call it in training")
    return "model file", "npu_rotary_mul", because, passed


def _hf(launch: Launch) -> Prediction:
    fused = "npu_rotary_mul" if launch.device == "npu" else "whorl"
    if launch.device == "npu" and launch.scope == "verl actor":
        because = "verl's npu_patch replaces apply_rotary_pos_emb"
        return "model file", fused, because, ("torch", "replaced by the patch")
    because = "transformers computes cos and sin in float32, casts them to the model's dtype and rotates in torch"
    passed = (fused, "transformers calls no fused rotary operator itself; an adapter must install one")
    return "model file", "torch", because, passed


def _torchtitan(launch: Launch) -> Prediction:
    if launch.style == "half" and (launch.text or {}).get("model_type") != "llama":
        because = "half style: torchtitan uses a cos/sin cache of width 2*dim"
        return "CosSinRoPE", "torch", because, ("torch_complex", "ComplexRoPE is for adjacent pairs")
    because = "adjacent pairs: torchtitan multiplies complex numbers"
    if launch.style == "half":
        because += "; it keeps Llama in Meta's channel order, and its checkpoint adapter permutes q and k"
    return "ComplexRoPE", "torch_complex", because, ("torch", "CosSinRoPE is for half style")


_FUSED: Final = ("torch", "the engine's operators are fused")
_ONE_TENSOR_A_CALL: Final = ("npu_rotary_mul", "it rotates one tensor a call, so q and k need two calls")


def _own_engine(launch: Launch) -> Prediction:
    """Return the operator of the language model in whorl's own engine.

    The engine looks up cos and sin and merges the MRoPE axes once a step, before the first layer, so the operator of a
    layer always applies plain RoPE.
    """
    model = launch.text or {}
    is_normed = str(model.get("model_type")).startswith(("qwen3", "gemma3"))
    if launch.device != "npu":
        kernel = "whorl::qk_norm_rope_write" if is_normed else "whorl::rope"
        because = f"{kernel} reads q and k from the output of their projection" + " and applies their norms" * is_normed
        return "text", "whorl", because, _FUSED
    refusal = _mrope_refusal(launch, launch.rope.head_dim if launch.rope else int(model.get("head_dim") or 128))
    if is_normed and refusal is None:
        because = "q and k are normed, then rotated by cos and sin that the engine has looked up and merged"
        return "text", "npu_mrope", because, _ONE_TENSOR_A_CALL
    passed = ("npu_mrope", refusal or "q and k are one tensor here, and it takes two")
    return "text", "npu_rotary_mul", "cos and sin are looked up and merged once a step", passed


def _own_tower(launch: Launch) -> Prediction | None:
    """Return the operator of the vision tower in whorl's own engine, or None for a model without one.

    The patch's row rotates one half of a head, its column the other half.
    """
    vision = (launch.inputs.model or {}).get("vision_config")
    if not isinstance(vision, Mapping) or not all(isinstance(vision.get(n), int) for n in ("hidden_size", "num_heads")):
        return None
    head = vision["hidden_size"] // max(vision["num_heads"], 1)
    because = f"whorl::rope rotates heads of {head} channels by rows and columns of patches; angles are computed once"
    if launch.device != "npu":
        return "tower", "whorl", because, _FUSED
    if (refusal := _mrope_refusal(launch, head)) is None:
        return "tower", "npu_mrope", because, _ONE_TENSOR_A_CALL
    return "tower", "npu_rotary_mul", because, ("npu_mrope", refusal)


def _mrope_refusal(launch: Launch, head: int) -> str | None:
    """Return the documented limit of npu_mrope that heads of this size break, or None."""
    dtype = str((launch.text or {}).get("dtype") or "bfloat16").removeprefix("torch.")
    shapes: dict[str, Any] = {"query_shape": (1, head), "key_shape": (1, head), "positions_shape": (1,)}
    return contracts.mrope_limit(**shapes, rotary_dim=head, head_size=head, dtype=dtype, table_dtype=dtype)


PATHS: Final[dict[str, Callable[[Launch], Prediction]]] = {
    "megatron": _megatron,
    "bridge": _megatron,
    "mindspeed": _megatron,
    "mindspeed-mm": _mindspeed_mm,
    "vllm": vllm_paths.predict,
    "sglang": sglang_paths.predict,
    "hf": _hf,
    "torchtitan": _torchtitan,
    "whorl": _own_engine,
}
