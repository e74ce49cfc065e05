"""What one side of a training computes: each function returns a `Fact` about a launch, read from its settings.

The defaults of frameworks are those of August 2026. A fact with an empty value is not known from the files.
"""

import re
from typing import Any, Final, NamedTuple

from whorl.doctor.jobs import SAMPLING
from whorl.doctor.launch import Launch
from whorl.doctor.promises import has_experts, invariance, is_on_in_environment, model_type, place
from whorl.doctor.report import RotaryPath
from whorl.rope_config import YARN_TYPES


class Fact(NamedTuple):
    """A value, and the setting or the default that gives it."""

    value: str = ""
    because: str = "not stated"

    def __str__(self) -> str:
        return f"{self.value or '?'} ({self.because})"


DTYPES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}
AUTOCAST: Final = "bf16, residuals in fp32"
MEGATRON_BASE: Final = 10000.0
MEGATRON_LLAMA3: Final = 8.0
QUANTISED_NAME: Final = re.compile(r"[-_](fp8|awq|gptq|int4|int8|w4a16|w8a8|w4a8|nvfp4|mxfp4|mxfp8)\b", re.IGNORECASE)
EIGHT_BITS_OR_LESS: Final = ("fp8", "int8", "nvfp4", "mxfp4", "mxfp8", "fp4", "int4")
# Settings that name the served model.
MODEL_NAMES: Final = ("hf_checkpoint", "model_path", "model_name_or_path", "model_name", "model", "model_tag")
CORRECTIONS: Final = (
    "use_tis",
    "use_importance_sampling_correction",
    "vllm_importance_sampling_correction",
    "rollout_is",
    "custom_tis_function_path",
    "use_opsm",
)
REPLAY: Final = re.compile(r"rout(er|ing)_replay|return_routed_experts")

# Values of sampling that change nothing.
PLAIN: Final = {"temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}


def dtype_name(value: object) -> str:
    name = str(value).removeprefix("torch.").lower()
    return DTYPES.get(name, name)


def _set(launch: Launch, key: str) -> Fact:
    """Return the setting of a dtype, or an unknown fact."""
    setting = launch.find(key)
    if setting is None or setting.value in (None, "auto") or str(setting.value).startswith("$"):
        return Fact()
    return Fact(dtype_name(setting.value), place(setting))


def of_flags(launch: Launch) -> bool:
    """Return whether Megatron computes frequencies from its flags alone, not from config.json."""
    own = launch.uses_megatron and not launch.uses_bridge
    return own and any(launch.find(key) for key in ("position_embedding_type", "rotary_base", "use_rope_scaling"))


def rotary_base(launch: Launch, path: RotaryPath) -> Fact:
    if of_flags(launch):
        base = launch.real("rotary_base")
        setting = launch.find("rotary_base")
        if base is not None and setting is not None:
            return Fact(f"{base:g}", place(setting))
        return Fact() if setting is not None else Fact(f"{MEGATRON_BASE:g}", "Megatron's default")
    return Fact() if launch.rope is None else Fact(f"{launch.rope.base:g}", launch.rope_where)


def rotary_scaling(launch: Launch, path: RotaryPath) -> Fact:
    rope = launch.rope
    if of_flags(launch):
        if launch.on("use_rope_scaling"):
            scale = launch.real("rope_scaling_factor") or MEGATRON_LLAMA3
            return Fact(f"llama3 x{scale:g}", launch.where("use_rope_scaling"))
        if (scale := launch.real("rotary_seq_len_interpolation_factor") or 1.0) != 1.0:
            return Fact(f"linear x{scale:g}", launch.where("rotary_seq_len_interpolation_factor"))
        by_flags = launch.branch == "yarn" or launch.get("rope_scaling_type") == "yarn" or launch.is_mla
        if by_flags:
            factor = launch.real("rope_scaling_factor") or launch.real("rotary_scaling_factor")
            return Fact() if factor is None else Fact(f"yarn x{factor:g}", "flags")
        return Fact("none", "no flag of scaling")
    if rope is None:
        return Fact()
    kind = "yarn" if rope.rope_type in YARN_TYPES else rope.rope_type
    return Fact("none" if kind == "default" else f"{kind} x{rope.factor:g}", launch.rope_where)


def rotary_sections(launch: Launch, path: RotaryPath) -> Fact:
    if launch.text is None and launch.sections is None:
        return Fact()
    if of_flags(launch) and launch.branch != "mrope":
        return Fact("one axis", launch.branch_and_reason[1])
    if path.operator in ("sglang_gated_rope", "npu_mrope") and launch.framework == "sglang" and launch.is_mrope:
        return Fact("the first of three axes", f"SGLang's {path.operator}")
    sections = launch.sections
    layout = f" {launch.layout}" if launch.layout else ""
    return Fact("one axis" if not sections else f"{list(sections)}{layout}", launch.rope_where)


def rotary_operator(launch: Launch, path: RotaryPath) -> Fact:
    return Fact(path.operator, path.because)


IN_FP32: Final = ("te_fused_rope", "te_fused_rope_thd", "torch_complex", "whorl", "sglang_rope", "sglang_gated_rope")


def cos_and_sin(launch: Launch, path: RotaryPath) -> Fact:
    """Return the precision of cos and sin where q and k are multiplied by them."""
    if path.operator in IN_FP32 or (launch.framework == "vllm" and model_type(launch) == "gpt_oss"):
        return Fact("fp32", f"{path.operator} of the {path.runs_in}")
    if path.operator in ("mla_fused_rope", "inductor") and launch.framework != "vllm":
        return Fact()
    if activations(launch, path).value == AUTOCAST:
        return Fact("fp32", "computed in the dtype of residuals")
    return Fact("rounded to the activations' dtype", f"{path.operator} of the {path.runs_in}")


def activations(launch: Launch, path: RotaryPath) -> Fact:
    """Return the dtype in which matrices are multiplied."""
    job = launch.scope.partition(" ")[0]
    if launch.on("fp16"):
        return Fact("fp16", launch.where("fp16"))
    for key in ("dtype", "precision", "torch_dtype"):
        fact = _set(launch, key)
        if fact.value and fact.value not in EIGHT_BITS_OR_LESS and not (job == "trl" and launch.train):
            return fact
    if job == "trl" and launch.train:
        own = _set(launch, "dtype")
        if own.value in ("bf16", "fp16") or launch.get("bf16") is False:
            return own if own.value else Fact("fp32", launch.where("bf16"))
        return Fact(AUTOCAST, "autocast over weights in fp32, TRL's default")
    if launch.train and job:
        return Fact("bf16", f"{job}'s default")
    if launch.on("bf16"):
        return Fact("bf16", launch.where("bf16"))
    if launch.uses_megatron:
        return Fact("bf16", "assumed") if launch.uses_bridge else Fact("fp32", "Megatron's default, without --bf16")
    written = (launch.text or {}).get("dtype") or (launch.text or {}).get("torch_dtype")
    return Fact(dtype_name(written), launch.inputs.model_where) if written else Fact()


def router(launch: Launch, path: RotaryPath) -> Fact:
    """Return the precision of the router's logits."""
    if not has_experts(launch):
        return Fact()
    kind, job = model_type(launch), launch.scope.partition(" ")[0]
    fact = _set(launch, "moe_router_dtype")
    if fact.value and launch.train:
        return fact
    if launch.uses_megatron:
        if job in ("verl", "nemo-rl") or launch.find("moe_router_dtype") is not None:
            return Fact()
        return Fact("bf16", "Megatron's default: the dtype of activations")
    if job == "prime-rl" and launch.train:
        return Fact("fp32", "prime-rl's default")
    if launch.framework == "hf":
        is_wide = kind.startswith(("deepseek", "glm"))
        return Fact("fp32" if is_wide else "bf16", "transformers' model file")
    is_patched = job == "prime-rl" and launch.get("enable_fp32_router_logits") is not False
    if is_patched and kind.startswith(("deepseek", "glm")):
        return Fact("fp32", "prime-rl's default")
    return Fact("bf16", f"{launch.framework}'s model file") if launch.framework in ("vllm", "sglang") else Fact()


def head(launch: Launch, path: RotaryPath) -> Fact:
    """Return the precision of the logits that the head writes."""
    job = launch.scope.partition(" ")[0]
    for key in ("enable_fp32_lm_head", "cast_lm_head_to_fp32", "fp32_lm_head"):
        if launch.on(key):
            return Fact("fp32", launch.where(key))
    if launch.framework == "vllm":
        own = (launch.text or {}).get("head_dtype") or (_overrides(launch).get("head_dtype"))
        if own:
            return Fact(dtype_name(own), "head_dtype")
        if job == "prime-rl" and launch.get("enable_fp32_lm_head") is not False:
            return Fact("fp32", "prime-rl's default")
    if launch.framework == "whorl":
        return Fact("fp32", "whorl's head")
    return Fact("rounded to the activations' dtype", f"{job or launch.framework}'s default")


def _overrides(launch: Launch) -> dict[str, Any]:
    overrides = launch.get("hf_overrides")  # with_overrides merges them only where there is a config.json
    return overrides if isinstance(overrides, dict) else {}


def quantised(launch: Launch, path: RotaryPath) -> Fact:
    """Return the format of weights that are not in 16 bits, or "16 bits"."""
    if launch.train:
        return _quantised_training(launch)
    for key in ("quantization", "precision"):
        setting = launch.find(key)
        if setting is not None and setting.value not in (None, False, "none"):
            name = dtype_name(setting.value)
            if key == "quantization" or name in EIGHT_BITS_OR_LESS:
                return Fact(name, place(setting))
    for key in MODEL_NAMES:
        for setting in reversed(launch.find_all(key)):
            if isinstance(setting.value, str) and (kind := QUANTISED_NAME.search(setting.value)):
                return Fact(kind[1].lower(), place(setting))
    config = (launch.inputs.model or {}).get("quantization_config")
    if isinstance(config, dict):
        return Fact(str(config.get("quant_method")), f"{launch.inputs.model_where} (quantization_config)")
    return Fact("16 bits", "no setting of quantisation")


def _quantised_training(launch: Launch) -> Fact:
    if is_on_in_environment(launch, "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"):
        return Fact("int4", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG")
    for setting in launch.inputs.settings:
        is_switch = setting.path.endswith("fp8_cfg.enabled") and setting.value is True
        is_kind = setting.path.endswith("quantization.type") or setting.key in ("fp8_format", "fp4_format")
        if is_switch or (is_kind and setting.value not in (None, False)):
            return Fact("fp8" if is_switch or setting.key == "fp8_format" else str(setting.value), place(setting))
    return Fact("16 bits", "no setting of quantisation")


def cache(launch: Launch, path: RotaryPath) -> Fact:
    """Return the dtype of the KV cache; a trainer has none."""
    setting = launch.find("kv_cache_dtype")
    if launch.train or setting is None or setting.value in (None, "auto", "bf16", "bfloat16"):
        return Fact("16 bits", "no cache" if launch.train else "the default")
    return Fact(str(setting.value), place(setting))


def ranks(launch: Launch, path: RotaryPath) -> Fact:
    number, setting = launch.number("tensor_parallel"), launch.find("tensor_parallel")
    if setting is not None:
        return Fact(str(number), place(setting)) if number is not None else Fact()
    default = "2" if launch.scope == "verl rollout" else "1"
    return Fact(default, "the default")


def logprobs(launch: Launch, path: RotaryPath) -> Fact:
    """Return what the logprobs of sampled tokens mean."""
    job = launch.scope.partition(" ")[0]
    if launch.train:
        kept = ", over the kept tokens" if job == "nemo-rl" else ", over the whole vocabulary"
        return Fact("divided by the temperature" + kept, f"{job or launch.framework} computes them again")
    setting = launch.find("logprobs_mode")
    if setting is not None:
        return Fact(str(setting.value).removesuffix("_logprobs"), place(setting))
    if launch.framework == "sglang":
        return Fact("divided by the temperature, over the whole vocabulary", "SGLang's sampler")
    if job in ("verl", "trl", "prime-rl", "vime", "nemo-rl"):
        return Fact("processed", f"{job}'s default")
    return Fact("raw", "vLLM's default") if launch.framework == "vllm" else Fact()


def promise(launch: Launch, path: RotaryPath) -> Fact:
    setting = invariance(launch)
    if setting is not None:
        return Fact("yes", place(setting))
    return Fact("yes", "always") if launch.framework == "whorl" else Fact("no", "not asked for")


def prompts(launch: Launch, path: RotaryPath) -> Fact:
    """Return whether a prompt is computed whole."""
    if launch.train:
        return Fact("whole", "a trainer computes whole sequences")
    key, whole = ("chunked_prefill_size", -1) if launch.framework == "sglang" else ("enable_chunked_prefill", False)
    because = launch.where(key) if launch.find(key) else "the default"
    return Fact("whole" if launch.get(key) == whole else "in chunks", because)


def prefixes(launch: Launch, path: RotaryPath) -> Fact:
    """Return whether keys and values of earlier requests are used again."""
    if launch.train:
        return Fact("off", "a trainer has no cache")
    for key, off in (("enable_prefix_caching", False), ("disable_radix_cache", True)):
        if launch.get(key) is off:
            return Fact("off", launch.where(key))
    return Fact("on", "the default")


def sampling(launch: Launch) -> dict[str, float]:
    """Return the settings of sampling that differ from plain sampling at temperature 1."""
    values = {key: launch.real(key) for key in SAMPLING}
    return {key: value for key, value in values.items() if value is not None and value not in PLAIN[key]}
