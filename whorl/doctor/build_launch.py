"""Build a Launch from the inputs: infer the framework and the device, and read the model's RopeConfig."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from whorl.doctor.inputs import Inputs
from whorl.doctor.launch import DEVICES, FRAMEWORKS, TRAINING, Launch, rope_entries, text_config
from whorl.doctor.overrides import with_overrides
from whorl.doctor.settings import BadInput, Setting
from whorl.rope_config import RopeConfig, UnknownFamilyWarning

# Patterns that identify a framework, matched against path=value of every setting. The first match wins.
SIGNS: Final = (
    ("verl", r"(actor_rollout_ref\..*|verl)=.*|command verl\..*"),
    ("slime", r"(sglang_\w+|rollout_num_gpus_per_engine|slime)=.*"),
    ("nemo-rl", r"policy\.(generation|megatron_cfg|dtensor_cfg)\..*"),
    ("prime-rl", r"(orchestrator|inference\.vllm|trainer\.model)\..*"),
    (
        "trl",
        r"(use_vllm|vllm_mode|vllm_importance_sampling_\w+|vllm_server_\w+)=.*|command trl (grpo|rloo|online.dpo)=.*",
    ),
    ("mindspeed-mm", r"(mm_model|mm_data|mindspeed_mm|MM_TOOL_PATH)=.*|command .*mindspeed_mm/.*"),
    ("bridge", r"megatron_bridge=.*|(.*\.)?language_transformer_config\..*|.*_target_=megatron\.bridge.*"),
    ("mindspeed", r"(use_fused_rotary_pos_emb|use_fused_rmsnorm|use_fused_swiglu|mindspeed|mindspeed_llm)=.*"),
    ("mindspeed", r"spec=mindspeed_llm\..*|rope_scaling_(type|mscale|mscale_all_dim)=.*"),
    ("torchtitan", r"(model\.flavor|training\.local_batch_size|job\..*|torchtitan)=.*|command torchtitan.*"),
    ("torchtitan", r"command \S*whorl train=.*"),
    ("whorl", r"command \S*whorl (chat|generate|serve)=.*"),
    ("vllm", r"command (trl )?vllm.*"),
    ("sglang", r"command sglang.*"),
    ("whorl", r"command \S*whorl bench=.*"),  # after vLLM's: `whorl bench serve` measures other servers, too
    ("vllm", r"(max_model_len|gpu_memory_utilization|enforce_eager|max_num_seqs|hf_overrides|vllm|vllm_ascend)=.*"),
    ("sglang", r"(mem_fraction_static|chunked_prefill_size|disable_radix_cache|json_model_override_args|sglang)=.*"),
    ("megatron", r"(.*\.)?(position_embedding_type|tensor_model_parallel_size|apply_rope_fusion|rotary_base)=.*"),
    ("megatron", r"(no_rope_fusion|rotary_percent|mrope_section|megatron_core|use_rotary_position_embeddings)=.*"),
)
NPU_SIGNS: Final = (
    r"(torch_npu|vllm_ascend|triton_ascend|cann|use_fused_rotary_pos_emb|mindspeed)=.*|(.*\.)?(HCCL|ASCEND)_.*"
)


def build_launch(inputs: Inputs, *, framework: str | None, train: bool, device: str | None) -> Launch:
    """Infer framework and device where they are None, read the model's rotary config, and return the Launch.

    Raises BadInput for an unknown framework or device.
    """
    if framework == "vllm-ascend":
        framework, device = "vllm", device or "npu"
    if framework is not None and framework not in FRAMEWORKS:
        raise BadInput(f"--framework {framework!r}: choose one of {', '.join(FRAMEWORKS)}, or leave it out to infer it")
    if device is not None and device not in DEVICES:
        raise BadInput(f"--device {device!r}: choose one of {', '.join(DEVICES)}")
    framework, framework_because = (framework, "set by --framework") if framework else _infer_framework(inputs)
    device, device_because = (device, "set by --device") if device else _infer_device(inputs, framework)
    changed, rope_changed_by = with_overrides(inputs)
    text = text_config(changed)
    rope, problem, caught = _rope_config(text)
    launch = Launch(
        framework=framework,
        framework_because=framework_because,
        device=device,
        device_because=device_because,
        train=train or framework in TRAINING,
        inputs=inputs,
        text=text,
        rope=rope,
        rope_problem=problem,
        rope_changed_by=rope_changed_by,
        rope_warnings=tuple(str(w.message) for w in caught if w.category is not UnknownFamilyWarning),
        unknown_family=next((str(w.message) for w in caught if w.category is UnknownFamilyWarning), None),
    )
    return replace(launch, rope=_rope_of_flags(launch)) if inputs.model is None and launch.uses_megatron else launch


def _rope_of_flags(launch: Launch) -> RopeConfig | None:
    """Return the RopeConfig that Megatron's flags describe, without scaling and sections; None where they do not."""
    length = launch.number("max_position_embeddings") or launch.number("sequence_length")
    sizes = {
        "head_dim": launch.number("qk_pos_emb_head_dim") if launch.is_mla else launch.number("kv_channels"),
        "hidden_size": launch.number("hidden_size"),
        "num_attention_heads": launch.number("num_attention_heads"),
        "max_position_embeddings": length,
        "rope_theta": launch.real("rotary_base"),
        "partial_rotary_factor": launch.real("rotary_percent"),
        "rope_interleave": launch.on("rotary_interleaved"),
    }
    try:
        return RopeConfig.from_hf({name: value for name, value in sizes.items() if value is not None})
    except ValueError:
        return None  # a flag is missing or a shell variable: the checks that need sizes are left out


def _path_and_value(setting: Setting) -> str:
    """Return "path=value", the text that SIGNS and NPU_SIGNS are matched against."""
    path = setting.path.lstrip("+").replace("-", "_")
    return f"{path}={setting.value}"


def _infer_framework(inputs: Inputs) -> tuple[str, str]:
    """Return the framework and the reason for it."""
    for framework, pattern in SIGNS:
        for setting in inputs.settings:
            if re.fullmatch(pattern, _path_and_value(setting), re.DOTALL):
                because = f"inferred from {setting.path} in {setting.where}"
                return ("vime" if framework == "slime" and _is_vime(inputs) else framework), because
    return "hf", "assumed: no launch flag names a framework"


def _is_vime(inputs: Inputs) -> bool:
    """Return whether a script in slime's form has vLLM's flags behind a prefix instead of SGLang's."""
    prefixes = {setting.key.partition("_")[0] for setting in inputs.settings if setting.kind == "argument"}
    return "vllm" in prefixes and "sglang" not in prefixes


def _infer_device(inputs: Inputs, framework: str) -> tuple[str, str]:
    """Return the device and the reason for it."""
    if framework in ("mindspeed", "mindspeed-mm"):
        return "npu", f"inferred from the framework, {framework}"
    for setting in inputs.settings:
        if setting.key in ("device", "device_type", "device_name") and setting.value in DEVICES:
            return setting.value, f"inferred from {setting.path} in {setting.where}"
        if re.fullmatch(NPU_SIGNS, _path_and_value(setting), re.DOTALL):
            return "npu", f"inferred from {setting.path} in {setting.where}"
    return "cuda", "assumed: nothing names a device"


def _rope_config(text: Mapping[str, Any] | None) -> tuple[RopeConfig | None, str | None, list[warnings.WarningMessage]]:
    """Return the RopeConfig of the text model, the first error that RopeConfig raised (or None), and its warnings.

    The checks need the rotary size even where RopeConfig refuses the config. So a refused config is read again without
    its MRoPE sections, and then, because model_type may imply sections, once more as Llama's. The RopeConfig is None
    when all three attempts fail.
    """
    if text is None:
        return None, None, []
    entries = {key: value for key, value in rope_entries(text).items() if key != "mrope_section"}
    spelling = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    problem = None
    for attempt in (text, {**text, spelling: entries}, {**text, spelling: entries, "model_type": "llama"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return _main_rope(attempt), problem, caught
            except ValueError as error:
                problem = problem or str(error)
    return None, problem, []


def _main_rope(text: Mapping[str, Any]) -> RopeConfig:
    """Return the RopeConfig; where layer types have different ones, that of the full-attention layers."""
    try:
        return RopeConfig.from_hf(text)
    except ValueError as error:
        nested = [name for name, value in rope_entries(text).items() if isinstance(value, Mapping)]
        if not nested and "layer_type=" not in str(error):
            raise
        layer_type = "full_attention" if "full_attention" in nested or not nested else nested[0]
        return RopeConfig.from_hf(text, layer_type=layer_type)
