"""Predict the rotary operator of vLLM and vllm-ascend: the class that get_rope picks, and the branch of its forward."""

from typing import Final

from whorl.doctor.launch import Launch, dotted
from whorl.doctor.report import Prediction

VLLM_CLASSES: Final = {
    "default": "RotaryEmbedding",
    "llama3": "Llama3RotaryEmbedding",
    "linear": "LinearScalingRotaryEmbedding",
    "ntk": "NTKScalingRotaryEmbedding",
    "yarn": "YaRNScalingRotaryEmbedding",
    "deepseek_yarn": "DeepseekScalingRotaryEmbedding",
    "deepseek_llama_scaling": "DeepseekScalingRotaryEmbedding",
    "telechat3-yarn": "TeleChat3RoPEScaledRotaryEmbedding",
    "longrope": "Phi3LongRoPEScaledRotaryEmbedding",
    "proportional": "Gemma4RotaryEmbedding",
    "xdrope": "XDRotaryEmbedding",
    "openpangu": "MRotaryEmbeddingInterleaved",
    "mllama4": "Llama4VisionRotaryEmbedding",
    "fope": "FourierRotaryEmbedding",
}
VLLM_ASCEND_REPLACES: Final = ("RotaryEmbedding", "YaRNScalingRotaryEmbedding", "DeepseekScalingRotaryEmbedding")
VLLM_ASCEND_MROPE_SECTIONS: Final = (16, 24, 24)  # the only sections that vllm-ascend passes to npu_mrope
ATB_UNTIL: Final = (0, 11)  # vllm-ascend before 0.11 calls ATB, or its own operator, for every class
TORCHAIR_UNTIL: Final = (0, 13)  # vllm-ascend before 0.13 has torchair's graphs
TORCHAIR_QWEN: Final = ("qwen2", "qwen3_moe")  # have model files of their own for torchair's graphs
_ATB: Final = "_npu_rotary_embedding"


def predict(launch: Launch) -> Prediction:
    """Return the rotary operator of vLLM, or of vllm-ascend where the device is an NPU."""
    if launch.device == "npu":
        return _ascend(launch)
    branch, kernel = vllm_class(launch), "triton_mrope" if launch.is_mrope else "vllm_rotary_embedding"
    if launch.on("enforce_eager"):
        because = "enforce_eager is set, so vLLM's own kernel runs"
        return branch, kernel, because, ("inductor", "enforce_eager turns torch.compile off")
    passed = (kernel, "custom_ops is 'none' by default when Inductor compiles")
    return branch, "inductor", "torch.compile is on (enforce_eager is not set)", passed


def vllm_class(launch: Launch) -> str:
    """Return the class that vLLM's get_rope picks, as far as the config decides it."""
    rope = launch.rope
    kind = launch.uncomputable or (rope.rope_type if rope else "default")
    if rope and rope.is_dual_chunk:
        return "DualChunkRotaryEmbedding"
    if kind == "dynamic":
        return "DynamicNTKAlphaRotaryEmbedding" if rope and rope.alpha else "DynamicNTKScalingRotaryEmbedding"
    if launch.is_mrope and kind not in ("xdrope", "openpangu"):
        return "MRotaryEmbedding"
    return VLLM_CLASSES.get(kind, f"class for rope_type {kind!r}")


def has_triton_ascend(launch: Launch) -> bool:
    """Return whether vllm-ascend uses its Triton kernels: yes, unless a file lists packages without triton-ascend."""
    return launch.has("triton_ascend") is not False


def is_310p(launch: Launch) -> bool:
    soc = launch.environment("SOC_VERSION")
    return "310p" in str(soc.value if soc else launch.get("soc_version", "")).lower()


def is_old(launch: Launch) -> bool:
    """Return whether this is vllm-ascend 0.10 or older."""
    version = launch.version("vllm_ascend")
    return version is not None and version < ATB_UNTIL


def uses_torchair(launch: Launch) -> bool:
    """Return whether torchair's graphs are on: additional_config.torchair_graph_config.enabled."""
    version, config = launch.version("vllm_ascend"), launch.get("additional_config")
    if version is not None and version >= TORCHAIR_UNTIL:
        return False
    graph = config.get("torchair_graph_config") if isinstance(config, dict) else None
    if isinstance(graph, dict) and graph.get("enabled") is True:
        return True
    return any("torchair_graph_config" in s.path and s.value is True for s in launch.find_all("enabled"))


def _ascend(launch: Launch) -> Prediction:
    branch = vllm_class(launch)
    if uses_torchair(launch):
        return _torchair(launch, branch)
    if is_old(launch):
        return _ascend_0_10(launch, branch)
    if launch.is_mla:
        because = "MLA gets cos and sin through the attention metadata (npu_kv_rmsnorm_rope_cache rotates the key)"
        passed = ("npu_mrope", "is called for RotaryEmbedding and MRotaryEmbedding, not for MLA")
        return "MLA", "npu_interleave_rope", because, passed
    if is_310p(launch):
        return _ascend_310p(launch, branch)
    if branch == "MRotaryEmbedding":
        return _ascend_mrope(launch)
    if branch not in VLLM_ASCEND_REPLACES:
        because = f"vllm-ascend does not replace {branch}: its native forward runs"
        return branch, "torch", because, ("triton_rope", f"is called for {', '.join(VLLM_ASCEND_REPLACES)}")
    if has_triton_ascend(launch):
        because = "triton-ascend is installed, or assumed to be where no file lists packages"
        return branch, "triton_rope", because, ("npu_mrope", "used only without triton-ascend")
    because = "without triton-ascend npu_mrope runs, with mrope_section=[0, 0, 0]"
    return branch, "npu_mrope", because, ("triton_rope", "triton-ascend is not among the packages")


def _torchair(launch: Launch, branch: str) -> Prediction:
    """Return the operator inside torchair's graph, which runs decode steps; those of other steps are passed over."""
    graph = "torchair_graph_config is enabled"
    if launch.is_mla:
        because = f"{graph}: decode steps of MLA get cos and sin through the attention metadata"
        native = "rotates prompts: beside torchair's graph DeepSeek's class runs its native forward"
        return "MLA", "npu_interleave_rope", because, ("torch", native)
    if str((launch.text or {}).get("model_type")) in TORCHAIR_QWEN:
        other = "ascend_rotary_embedding" if _runs_own_operator(launch) else _ATB
        because = f"{graph}, and Qwen's model file for it looks cos and sin up once for all layers of a decode step"
        return branch, "npu_apply_rotary_pos_emb", because, (other, "rotates steps that hold prompts")
    because = f"{graph}: {branch} runs its native forward, which torchair compiles"
    return branch, "torch", because, (_ATB, "called only without torchair's graph")


def _runs_own_operator(launch: Launch) -> bool:
    """Return whether vllm-ascend 0.10 calls the operator of its own: float16, halves, head size a multiple of 32.

    DeepSeek's class reorders pairs into halves first.
    """
    dtype = str(launch.get("dtype") or (launch.text or {}).get("dtype") or (launch.text or {}).get("torch_dtype"))
    switch = launch.environment("COMPILE_CUSTOM_KERNELS")
    is_compiled = switch is None or str(switch.value) not in ("0", "False", "false")
    size = launch.rope.rotary_dim if launch.rope and launch.is_mla else launch.rope.head_dim if launch.rope else 0
    is_half = launch.style == "half" or launch.is_mla
    in_16_bits = dtype.removeprefix("torch.") in ("float16", "half")
    return in_16_bits and is_half and size > 0 and size % 32 == 0 and is_compiled and not is_310p(launch)


def _ascend_0_10(launch: Launch, branch: str) -> Prediction:
    version = dotted(launch.version("vllm_ascend"))
    if branch == "MRotaryEmbedding":
        return _ascend_mrope(launch)
    order = "; DeepSeek's class reorders the pairs into halves before it" if launch.is_mla else ""
    if _runs_own_operator(launch):
        because = f"vllm-ascend {version} calls its own operator in float16 for halves and head sizes of n x 32{order}"
        passed = (_ATB, "called for other dtypes, styles and head sizes, and on Atlas 310P")
        return branch, "ascend_rotary_embedding", because, passed
    because = f"vllm-ascend {version} calls ATB for every RotaryEmbedding{order}"
    return branch, _ATB, because, ("npu_mrope", "not called by this version")


def _ascend_310p(launch: Launch, branch: str) -> Prediction:
    """Return the operator on Atlas 310P, where cos and sin are looked up once per step for all layers."""
    rotary, head = (launch.rope.rotary_dim, launch.rope.head_dim) if launch.rope else (128, 128)
    fused = "npu_apply_rotary_pos_emb"
    once = "Atlas 310P: cos and sin are looked up once per step and every layer applies them"
    if launch.is_mrope and rotary in (64, 128):
        return branch, fused, once, ("npu_mrope", "not called on Atlas 310P")
    if launch.is_mrope:
        because = f"Atlas 310P, MRoPE with rotary size {rotary}: plain torch"
        return branch, "torch", because, (fused, "called for MRoPE with rotary size 64 or 128")
    if (rotary, head) == (128, 128) or (rotary == 64 and head > 64):
        return branch, fused, once, ("triton_rope", "not used on Atlas 310P")
    sliced = ", after slicing the rotary channels off" if rotary < head else ""
    because = f"Atlas 310P with rotary size {rotary} of head size {head} calls ATB{sliced}"
    return branch, _ATB, because, (fused, "called for rotary size 128 of head size 128, and for 64 of larger heads")


def _ascend_mrope(launch: Launch) -> Prediction:
    branch, sections = "MRotaryEmbedding", list(launch.sections or ())
    if launch.layout == "interleaved" and has_triton_ascend(launch):
        passed = ("npu_mrope", "Triton is preferred for interleaved sections")
        return branch, "triton_mrope", "interleaved sections and triton-ascend", passed
    if launch.sections == VLLM_ASCEND_MROPE_SECTIONS:
        passed = ("triton_mrope", "used only for interleaved sections, where triton-ascend is installed")
        return branch, "npu_mrope", f"mrope_section is {sections}", passed
    gate = f"vllm-ascend calls it only for mrope_section {list(VLLM_ASCEND_MROPE_SECTIONS)}"
    return branch, "torch", f"mrope_section is {sections}", ("npu_mrope", gate)
