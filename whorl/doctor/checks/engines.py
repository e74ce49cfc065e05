"""Checks of faults that users of SGLang and vllm-ascend have reported, each for the versions of its thread."""

from collections.abc import Iterator
from typing import Any, Final

from whorl.doctor.launch import Launch, dotted
from whorl.doctor.promises import has_experts, has_only_text, is_on_in_environment, model_type
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule
from whorl.doctor.vllm_paths import is_310p

# SGLang's releases whose kernel for Qwen3.5 reads one row of positions; #34446 mends it after them.
GATED_ROPE_BROKEN: Final = ((0, 5, 15), (0, 5, 17))
FLASHCOMM_DEEPSTACK: Final = (0, 18)  # vllm-ascend's release with #7897
FLASHCOMM_QWEN3_5: Final = (0, 19, 1)  # the newest release in the threads
DEEPSTACK: Final = ("qwen3_vl", "qwen3_omni")


@rule("mrope-positions-dropped")
def gated_kernel_reads_one_row(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    version = launch.version("sglang")
    oldest, newest = GATED_ROPE_BROKEN
    if path.operator != "sglang_gated_rope" or not launch.is_mrope or launch.is_text_only:
        return
    if version is not None and not oldest <= version[:3] <= newest:
        return
    yield Finding(
        found=f"{model_type(launch)} on SGLang"
        + ("" if version is None else f" {dotted(version)}")
        + (", in a job that names no pictures" if has_only_text(launch) else ""),
        expected="SGLang before 0.5.15, or a build with #34446",
        why="fused_qk_gemma_rmsnorm_rope_gate reads only the temporal row of [3, T] positions. Nothing fails, text is "
        "right, and places in pictures are off by about 90 pixels: 26.7% instead of 81.7% of clicks "
        "(sgl-project/sglang#35345, #36762, 0.5.15 to 0.5.17; THUDM/slime#2336: its image has 0.5.15.post1).",
        fix=(
            "a build with #34446",
            "or vLLM for the rollout",
            "or call forward_prepare_fused_gate where positions.ndim is 2",
        ),
        severity="note" if has_only_text(launch) else "error" if version is not None else "warning",
    )


@rule("mrope-positions-dropped", "warning")
def npu_operator_without_sections(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.framework == "sglang" and path.operator == "npu_mrope" and launch.is_mrope and not launch.is_text_only:
        yield Finding(
            found=f"npu_mrope with mrope_section=[0, 0, 0] for a model of sections {list(launch.sections or ())}",
            expected="the native forward, or the Triton kernel of #35817 for Qwen3.5 and 3.6",
            why="SGLang's MRotaryEmbedding.forward_npu passes no sections, so tokens of pictures get one position in "
            "place of three; users report wrong places in pictures (sgl-project/sglang#36959, open in September 2026). "
            "The native code lost no throughput there.",
            fix=("apply #36959 (forward_npu calls forward_native)", "or update to a build with #35817"),
        )


def _flashcomm(launch: Launch) -> str:
    """Return where FlashComm1 is switched on, or an empty text."""
    for name in ("VLLM_ASCEND_ENABLE_FLASHCOMM1", "VLLM_ASCEND_ENABLE_FLASHCOMM"):
        setting = launch.environment(name)
        if setting is not None and is_on_in_environment(launch, name):
            return f"{setting.where} ({name})"
    config = launch.get("additional_config")
    if isinstance(config, dict) and config.get("enable_flashcomm1") is True:
        return launch.where("additional_config")
    return launch.where("enable_flashcomm1") if launch.on("enable_flashcomm1") else ""


@rule("flashcomm-unsupported", at=_flashcomm)
def flashcomm_with_deepstack(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    version, is_stacked = launch.version("vllm_ascend"), model_type(launch).startswith(DEEPSTACK)
    if launch.on_ascend and _flashcomm(launch) and is_stacked and (version is None or version < FLASHCOMM_DEEPSTACK):
        yield Finding(
            found="FlashComm1 with a model whose tower feeds several layers (deepstack)",
            expected="vllm-ascend 0.18 or newer, or FlashComm1 off",
            why="The tower's embeddings stay whole while hidden states are split over the ranks, so their sum fails "
            "with a size mismatch (vllm-project/vllm-ascend#7897, #4132, #6261).",
            fix=("unset VLLM_ASCEND_ENABLE_FLASHCOMM1", "or update vllm-ascend to 0.18"),
            severity="error" if version is not None else "warning",
        )


@rule("flashcomm-unsupported", "warning", at=_flashcomm)
def flashcomm_with_qwen3_5(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    version, is_family = launch.version("vllm_ascend"), model_type(launch).startswith("qwen3_5")
    is_known = version is None or version <= FLASHCOMM_QWEN3_5
    if not launch.on_ascend or not _flashcomm(launch) or not is_family or not is_known:
        return
    drafts = "mtp" in str(launch.get("speculative_config")).lower()
    yield Finding(
        found="FlashComm1 with Qwen3.5" + (" and MTP" if drafts else ""),
        expected="FlashComm1 off",
        why="With MTP the accuracy drops now and then (vllm-project/vllm-ascend#8989, Qwen3.5-397B on A3)."
        if drafts
        else "vllm-ascend 0.19.1rc1 does not support it for this family (vllm-project/vllm-ascend#8990, #8569).",
        fix="unset VLLM_ASCEND_ENABLE_FLASHCOMM1",
    )


def _quantised_name(launch: Launch) -> str:
    """Return the name or path of the served model in upper case, where scripts of msmodelslim say the scheme."""
    keys = ("model", "model_path", "save_directory", "save_path", "model_tag")
    command = [str(s.value) for s in launch.inputs.settings if s.kind == "argument" and s.key in keys]
    return " ".join(command).upper()


@rule("ascend-quantisation", "warning", at="quantization")
def four_bits_of_dense_layers(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    bits = (launch.number("w_bit"), launch.number("a_bit"))
    is_w4a16 = bits == (4, 16) or "W4A16" in _quantised_name(launch)
    if launch.on_ascend and launch.get("quantization") == "ascend" and is_w4a16 and not has_experts(launch):
        yield Finding(
            found="W4A16 for the linear layers of a dense model",
            expected="W8A8, or W4A16 for experts only",
            why="vllm-ascend has no W4A16 method for linear layers: the engine fails while it builds them "
            "(vllm-project/vllm-ascend#6481, open in April 2026).",
            fix="quantise again: --w_bit 8 --a_bit 8",
        )


@rule("ascend-quantisation", "warning", at="anti_method")
def smooth_quant_m4_of_qwen3(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if (
        launch.get("anti_method") == "m4"
        and model_type(launch).startswith("qwen3")
        and launch.number("w_bit") in (8, None)
    ):
        yield Finding(
            found="W8A8 of Qwen3 by msmodelslim with anti_method m4 (SmoothQuant)",
            expected="another anti_method",
            why="The checkpoint loads and its answers are garbage (vllm-project/vllm-ascend#2318, Qwen3-32B on "
            "0.9.1rc2).",
            fix="quantise again with --anti_method m1 or m2, and compare answers with those in bf16",
        )


@rule("ascend-quantisation")
def compressed_tensors_on_310p(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    config: Any = (launch.inputs.model or {}).get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if launch.on_ascend and is_310p(launch) and method == "compressed-tensors":
        yield Finding(
            where=f"{launch.inputs.model_where} (quantization_config)",
            found="a checkpoint of LLM-Compressor on Atlas 310P",
            expected="a checkpoint of msmodelslim (--quantization ascend)",
            why="vLLM's choice of an int8 kernel has none for this platform: the engine ends with KeyError "
            "(vllm-project/vllm-ascend#9129, resolved for later builds).",
            fix=("quantise with msmodelslim", "or update vllm-ascend"),
        )
