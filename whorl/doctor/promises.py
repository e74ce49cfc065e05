"""What a launch promises: the switch that asks for equal bits in any batch, and facts of its model."""

import re
from typing import Final

from whorl.doctor.launch import EXPERTS, Launch
from whorl.doctor.settings import Setting

# Settings that ask for the trainer's bits in the rollout, not only for the same bits in every batch.
EQUALITY: Final = ("zero_train_gen_mismatch", "true_on_policy_mode", "rl_on_policy_target")
# By framework: the settings that ask for results that do not depend on the batch.
SWITCHES: Final = {
    "vllm": ("full_determinism",),
    "sglang": ("enable_deterministic_inference", "rl_on_policy_target", "full_determinism"),
    "megatron": ("zero_train_gen_mismatch", "batch_invariant_mode", "true_on_policy_mode"),
    "hf": ("true_on_policy_mode",),
}
# Settings of a job that name a data set's pictures.
PICTURES: Final = re.compile(r"(?i)multimodal|image|video|vlm|geo3k|_mm_|mm_")
GATED_DELTA: Final = ("qwen3_5", "qwen3_next")  # model types that begin so have layers with a recurrent state


def invariance(launch: Launch) -> Setting | None:
    """Return the setting by which the launch asks for batch-invariant results, or None."""
    if launch.framework == "vllm" and is_on_in_environment(launch, "VLLM_BATCH_INVARIANT"):
        return launch.environment("VLLM_BATCH_INVARIANT")
    for key in SWITCHES.get("megatron" if launch.uses_megatron else launch.framework, ()):
        if launch.get(key) not in (None, False, "none"):
            return launch.find(key)
    return None


def is_on_in_environment(launch: Launch, name: str) -> bool:
    setting = launch.environment(name)
    return setting is not None and str(setting.value).strip().lower() in ("1", "true")


def has_experts(launch: Launch) -> bool:
    counts = [(launch.text or {}).get(key) for key in EXPERTS] + [launch.number("num_experts")]
    return any(isinstance(count, int) and count > 1 for count in counts)


def has_gated_delta(launch: Launch) -> bool:
    return model_type(launch).startswith(GATED_DELTA)


def has_vision(launch: Launch) -> bool:
    return "vision_config" in (launch.inputs.model or {})


def has_only_text(launch: Launch) -> bool:
    """Return whether a launch names no pictures, so that a token has the same position on every axis.

    That is known of a text architecture, and of a job.
    """
    if launch.is_text_only:
        return True
    is_job = launch.scope.startswith(("slime", "vime", "verl"))
    return is_job and not any(PICTURES.search(f"{s.path}={s.value}") for s in launch.inputs.settings)


def model_type(launch: Launch) -> str:
    return str((launch.text or {}).get("model_type") or "")


def place(setting: Setting) -> str:
    return f"{setting.where} ({setting.path})"
