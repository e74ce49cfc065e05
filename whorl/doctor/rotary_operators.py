"""The rotary operators that a path can end in, and the `RotaryPath` of one of them."""

from typing import Final, NamedTuple

from whorl.doctor.launch import Launch
from whorl.doctor.report import RotaryPath

Reasons = tuple[tuple[str, str], ...]  # operators that are not chosen, each with the reason


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


def make_path(launch: Launch, branch: str, operator: str, because: str, passed_over: Reasons = ()) -> RotaryPath:
    """Return the path that ends in `operator`, for this launch or this part of one."""
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
