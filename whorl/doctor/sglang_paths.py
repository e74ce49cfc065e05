"""Predict the rotary operator of SGLang: the class that its get_rope picks, and the branch of its forward."""

from typing import Final

from whorl.doctor.launch import Launch
from whorl.doctor.report import Prediction
from whorl.doctor.vllm_paths import vllm_class

FUSED_HEADS: Final = (64, 128, 256, 512)  # head sizes of SGLang's kernel on CUDA
WIDEST_NPU: Final = 4096  # columns of q on a rank up to which SGLang calls npu_mrope for MRoPE
GATED: Final = "qwen3_5"  # model types that begin so rotate inside the kernel that also applies the output gate


def predict(launch: Launch) -> Prediction:
    """Return the rotary operator of SGLang on CUDA or on an NPU."""
    branch = vllm_class(launch)  # get_rope is the same dispatch
    return _npu(launch, branch) if launch.device == "npu" else _cuda(launch, branch)


def has_gated_kernel(launch: Launch) -> bool:
    """Return whether Qwen3.5's fused kernel rotates: it does on CUDA, unless the model has no output gate."""
    text = launch.text or {}
    is_family = str(text.get("model_type")).startswith(GATED)
    return launch.device == "cuda" and is_family and text.get("attn_output_gate", True) is not False


def _cuda(launch: Launch, branch: str) -> Prediction:
    if has_gated_kernel(launch):
        because = "Qwen3.5's attention normalizes, rotates and splits off the gate in one kernel"
        return branch, "sglang_gated_rope", because, ("sglang_mrope", "is called only by models without this kernel")
    if launch.get("rl_on_policy_target") is not None:
        because = "rl_on_policy_target is set: the native forward runs, compiled"
        return branch, "inductor", because, ("sglang_rope", "rl_on_policy_target forces the native forward")
    if launch.is_mrope:
        because = "positions of three axes go to the Triton kernel"
        return branch, "sglang_mrope", because, ("torch", "runs for positions of one axis")
    head = launch.rope.head_dim if launch.rope else 128
    if head in FUSED_HEADS or launch.is_mla:
        passed = ("vllm_rotary_embedding", f"is called for head sizes other than {', '.join(map(str, FUSED_HEADS))}")
        return branch, "sglang_rope", "RotaryEmbedding.forward_cuda, with cos and sin in fp32", passed
    passed = ("sglang_rope", f"supports head sizes {', '.join(map(str, FUSED_HEADS))}")
    return branch, "vllm_rotary_embedding", f"head size {head} is not one of the fused kernel's", passed


def _npu(launch: Launch, branch: str) -> Prediction:
    if not launch.is_mrope:
        because = "RotaryEmbedding.forward_npu calls npu_mrope with mrope_section=[0, 0, 0]"
        return branch, "npu_mrope", because, ("torch", "runs where q or cos and sin have other dtypes")
    width = _query_width(launch)
    if width is not None and width > WIDEST_NPU:
        because = f"q has {width} columns on a rank"
        return branch, "torch", because, ("npu_mrope", f"is called for at most {WIDEST_NPU} columns")
    because = "MRotaryEmbedding.forward_npu calls it with mrope_section=[0, 0, 0]"
    return branch, "npu_mrope", because, ("torch", f"runs for q of more than {WIDEST_NPU} columns on a rank")


def _query_width(launch: Launch) -> int | None:
    """Return the columns of q on a rank, or None where config.json does not say."""
    heads, ranks = (launch.text or {}).get("num_attention_heads"), launch.number("tensor_parallel") or 1
    return heads * launch.rope.head_dim // ranks if isinstance(heads, int) and launch.rope else None
