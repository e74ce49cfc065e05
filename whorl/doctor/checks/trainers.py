"""Checks of faults that users of trainers have reported: DeepSpeed, Megatron Bridge, MindSpeed and vime."""

from collections.abc import Iterator
from typing import Final

from whorl.doctor.launch import Launch, rope_entries
from whorl.doctor.promises import has_gated_delta, has_vision
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule

DEEPSPEED_BASE: Final = 10000.0  # of DeepSpeed's rotary kernel where it finds no rope_theta
CORE_WITH_SPLIT_STATES: Final = (0, 18)  # Megatron Core with context parallelism of gated delta layers


@rule("rope-theta-lost", at="replace_with_kernel_inject")
def injected_kernel_has_its_own_base(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    transformers = launch.version("transformers")
    is_new = (transformers is not None and transformers >= (5,)) or "rope_theta" in rope_entries(launch.text)
    if not launch.on("replace_with_kernel_inject") or not is_new or launch.rope is None:
        return
    rope = launch.rope
    if rope.base == DEEPSPEED_BASE and rope.rope_type == "default":
        return
    scaling = "" if rope.rope_type == "default" else f" and no {rope.rope_type} scaling"
    yield Finding(
        found=f"DeepSpeed's injected kernels for a model with base {rope.base:g} ({rope.rope_type}), transformers 5",
        expected="replace_with_kernel_inject=false, or a DeepSpeed with #8341 (September 2026)",
        why="transformers 5 keeps rope_theta in rope_parameters, where DeepSpeed's kernels do not look: they rotate "
        f"with base {DEEPSPEED_BASE:g}{scaling}, and nothing fails (deepspeedai/DeepSpeed#8341, #8345, #8373).",
        fix="replace_with_kernel_inject=false",
    )


@rule("gated-delta-context-parallel", at="context_parallel")
def states_are_not_split(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    core, ranks = launch.version("megatron_core"), launch.number("context_parallel") or 1
    if not launch.uses_megatron or not has_gated_delta(launch) or ranks == 1:
        return
    if (core is None and launch.device != "npu") or (core is not None and core >= CORE_WITH_SPLIT_STATES):
        return
    yield Finding(
        found=f"context parallelism {ranks} for gated delta layers"
        + (" on MindSpeed" if launch.device == "npu" else ""),
        expected="context_parallel_size=1, or Megatron Core 0.18 and, on an NPU, ms-swift with #9814",
        why="Megatron Core before 0.18 refuses context parallelism for these layers, and on an NPU MindSpeed's helpers "
        "are not where the bridge imports them: ImportError: cannot import name 'tensor_a2a_cp2hp' "
        "(modelscope/ms-swift#9814, #9387; NVIDIA-NeMo/Megatron-Bridge#4327).",
        fix=("context_parallel_size=1", "or update megatron-core and the bridge together"),
        severity="error" if core is not None else "warning",
    )


@rule("vime-on-npu", at="megatron_to_hf_mode")
def raw_weights_drift(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_job = launch.scope in ("vime trainer", "slime trainer")
    if is_job and launch.device == "npu" and launch.get("megatron_to_hf_mode") == "raw":
        yield Finding(
            found="megatron_to_hf_mode raw on an NPU",
            expected="megatron_to_hf_mode bridge",
            why="In raw mode q, k and v are split and stacked again on their way to the rollout, which shifts weights "
            "on an NPU: logprobs differ by 0.05 to 0.18 instead of 0.014, and GRPO does not converge "
            "(vllm-project/vime#274; #275 makes bridge the default).",
            fix="--megatron-to-hf-mode bridge",
        )


@rule("vime-on-npu", "warning")
def vision_without_the_patches(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_listed = launch.package("vime") is not None
    if launch.scope == "vime trainer" and launch.device == "npu" and has_vision(launch) and not is_listed:
        yield Finding(
            found="a vision model trained by vime on an NPU, and no version of vime",
            expected="vime with #314 (2 July 2026) and its patches of Bridge, MindSpeed and vllm-ascend",
            why="Before it nothing fails and three things are wrong: an int32 mask used as an index collapses the "
            "positions of packed sequences (perplexity about 13000), MindSpeed's attention makes the vision tower "
            "causal (a difference of 0.8), and packed weights are read before they are written. Loading also stops at "
            "MindSpeedTEColumnParallelLinear, which Bridge's AutoMapping does not know (vllm-project/vime#314).",
            fix=("update vime", "write its version into requirements.txt: vime==..."),
        )
