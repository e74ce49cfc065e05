"""Checks of launches that promise equal bits in any batch: where vLLM, SGLang and Megatron do not keep it."""

from collections.abc import Iterator
from typing import Final

from whorl.doctor.launch import Launch
from whorl.doctor.promises import (
    has_experts,
    has_gated_delta,
    invariance,
    model_type,
    place,
)
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule

CODE: Final = "batch-invariance"
OTHER_ATTENTION: Final = ("TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA")  # vLLM's backends beside FlashAttention
SGLANG_ATTENTION: Final = ("ascend", "fa3", "fa4", "flashinfer", "triton")  # those that SGLang accepts with determinism
MANY_RANKS: Final = 4


def _switch(launch: Launch) -> str:
    setting = invariance(launch)
    return place(setting) if setting is not None else ""


def _promises(launch: Launch, framework: str, device: str = "cuda") -> bool:
    return launch.framework == framework and launch.device == device and invariance(launch) is not None


@rule(CODE, "warning", at=_switch)
def flash_attention_3_is_tiled_by_neighbours(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if not _promises(launch, "vllm") or has_gated_delta(launch):
        return
    backend = launch.get("attention_backend") or launch.get("backend")
    old = launch.environment("VLLM_ATTENTION_BACKEND")
    version, old_version = launch.get("flash_attn_version"), launch.environment("VLLM_FLASH_ATTN_VERSION")
    named = str(backend or (old.value if old else "")).upper().removesuffix("_VLLM_V1")
    if named in OTHER_ATTENTION or 2 in (version, int(old_version.value) if old_version else None):
        return
    yield Finding(
        found="VLLM_BATCH_INVARIANT with FlashAttention, which is version 3 on Hopper",
        expected="an attention whose tiles do not depend on neighbours, where the GPU is an H100, H200 or H20",
        why="FlashAttention 3 picks its tile by the longest row of the batch: when a neighbour's prompt grows from 9 "
        "to 10 tokens, the tile changes and decode rows get other bits, although num_splits is 1 "
        "(vllm-project/vllm#51902, seen in 0.25.1, open in September 2026). On other GPUs version 2 runs.",
        fix=("--attention-backend TRITON_ATTN", "or --attention-config.flash_attn_version 2"),
    )


@rule(CODE, "warning", at="quantization")
def online_fp8_experts_share_a_scale(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_online = launch.get("quantization") == "fp8" and "quantization_config" not in (launch.inputs.model or {})
    if _promises(launch, "vllm") and is_online and has_experts(launch):
        yield Finding(
            found="VLLM_BATCH_INVARIANT with experts quantised to FP8 while they are loaded",
            expected="experts in 16 bits, or a checkpoint in FP8 with blocks",
            why="The experts' activations get one scale for the whole batch, so a request's result depends on its "
            "neighbours (vllm-project/vllm#57016, seen in 0.27.1; fix #57092 open in September 2026).",
            fix=("leave --quantization fp8 out", "or serve a checkpoint that is stored in FP8 with blocks"),
        )


@rule(CODE, "warning", at=_switch)
def cached_prompts_take_another_kernel(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_cached = launch.get("enable_prefix_caching") is not False and launch.get("quantization") != "fp8"
    if _promises(launch, "vllm") and has_experts(launch) and is_cached and not has_gated_delta(launch):
        yield Finding(
            found="VLLM_BATCH_INVARIANT with experts and the prefix cache",
            expected="--no-enable-prefix-caching on Hopper",
            why="A request that finds its whole prompt in the cache computes one token, and on Hopper its experts then "
            "give other bits than those of the same request run cold (vllm-project/vllm#57016, seen in 0.27.1). The "
            "tests of determinism do not cover the prefix cache (#40896, #46592).",
        )


@rule(CODE, "warning", at=_switch)
def gated_delta_is_not_invariant(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if not has_gated_delta(launch):
        return
    if _promises(launch, "vllm"):
        yield Finding(
            found=f"VLLM_BATCH_INVARIANT for {model_type(launch)}, whose layers have a recurrent state",
            expected="a model with attention only",
            why="vLLM's attention backend GDN_ATTN does not declare batch invariance, so the engine refuses to start "
            "(vllm-project/vllm#38039; #49827 and #45819 open in September 2026). Decode and prompt also run two "
            "algorithms with other bits.",
            fix="leave VLLM_BATCH_INVARIANT out, and correct the trainer's ratio (truncated importance sampling)",
        )
    elif _promises(launch, "sglang") and model_type(launch).startswith("qwen3_5"):
        yield Finding(
            found=f"deterministic inference for {model_type(launch)}",
            expected="a model on which SGLang's tests of determinism pass",
            why="Qwen3.5 and 3.6 give different results with different batches in spite of the switch "
            "(sgl-project/sglang#31261, open in September 2026; #35632 mends prompts on Hopper).",
            fix="a build with #35632, and python -m sglang.test.test_deterministic on this model",
        )


@rule(CODE, "warning", at=_switch)
def gpt_oss_failed(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if _promises(launch, "vllm") and model_type(launch) == "gpt_oss":
        yield Finding(
            found="VLLM_BATCH_INVARIANT for gpt-oss",
            expected="a test of your own: the same prompts alone and in a batch",
            why="The documentation lists gpt-oss as tested, and a user found 32 of 32 prompts different "
            "(vllm-project/vllm#35404).",
        )


@rule(CODE, "warning", at="speculative_config")
def drafts_change_the_batch(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if _promises(launch, "vllm") and launch.get("speculative_config"):
        yield Finding(
            found="VLLM_BATCH_INVARIANT with speculative decoding",
            expected="no speculation, where equal bits matter",
            why="A verified draft is computed with k + 1 rows and a plain step with one; the kernels are not equal in "
            "this direction, so text differs from that without drafts (vllm-project/vllm#54506, #52522, open).",
            fix="leave --speculative-config out",
        )


@rule(CODE, at="attention_backend")
def sglang_refuses_the_backend(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    backend = launch.get("attention_backend")
    is_asked = launch.framework == "sglang" and launch.on("enable_deterministic_inference")
    if is_asked and backend not in (None, *SGLANG_ATTENTION):
        yield Finding(
            found=f"--attention-backend {backend} with deterministic inference",
            expected=f"one of {', '.join(SGLANG_ATTENTION)}",
            why="SGLang raises ValueError for any other attention backend.",
            fix="--attention-backend fa3, or leave the flag out",
        )


@rule(CODE, "note", at="tensor_parallel")
def sglang_experts_on_many_ranks(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    ranks = launch.number("tensor_parallel") or 1
    if _promises(launch, "sglang") and has_experts(launch) and ranks >= MANY_RANKS:
        yield Finding(
            found=f"deterministic inference of experts on {ranks} ranks",
            expected="a test on your build: python -m sglang.test.test_deterministic --test-mode mixed",
            why="Users saw equal results on two ranks and different ones on four and eight (sgl-project/sglang#10785).",
        )


@rule(CODE, "warning", at=_switch)
def ascend_covers_less(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if not _promises(launch, "vllm", "npu"):
        return
    config = launch.get("compilation_config")
    mode = str(launch.get("cudagraph_mode") or (config.get("cudagraph_mode") if isinstance(config, dict) else ""))
    missing = ["multi-latent attention"] * launch.is_mla + [f"cudagraph_mode {mode}"] * mode.upper().startswith("FULL")
    if missing:
        yield Finding(
            found=f"VLLM_BATCH_INVARIANT on an NPU with {' and '.join(missing)}",
            expected="grouped-query attention, and piecewise graphs",
            why="vllm-ascend's batch-invariant operators do not cover multi-latent and sparse attention, nor full "
            "graphs (vllm-project/vllm-ascend#5487).",
            fix=("--compilation-config.cudagraph_mode PIECEWISE",) if not launch.is_mla else ("no promise here",),
        )


@rule("lora-batch-drift", "warning", at="enable_lora")
def adapters_drift_on_an_npu(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    version = launch.version("vllm_ascend")
    is_known = version is None or (0, 20) <= version[:2] <= (0, 23)
    if launch.on_ascend and launch.on("enable_lora") and launch.is_mrope and is_known:
        yield Finding(
            found="adapters (LoRA) on vllm-ascend" + ("" if version is None else f" {'.'.join(map(str, version))}"),
            expected="merged weights, or a test: the same requests alone and in a batch",
            why="With several adapters in a batch, answers differ from those of the same requests alone "
            "(vllm-project/vllm-ascend#12610, Qwen3-VL-8B on 0.23.0rc1; a GPU shows none), and the adapters' operators "
            "lose precision (#11221).",
            fix="merge the adapter into the weights for the rollout",
        )


@rule("batch-invariance-refused", at="batch_invariant_mode")
def megatron_refuses(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if not launch.uses_megatron or not launch.on("batch_invariant_mode"):
        return
    if wrong := _megatron_violations(launch):
        yield Finding(
            found="batch_invariant_mode with " + ", ".join(what for what, _ in wrong),
            expected=", ".join(fix for _, fix in wrong),
            why="Megatron Core's TransformerConfig refuses these one by one, late in the set-up: each is a kernel "
            "whose sums depend on the batch.",
            fix=tuple(fix for _, fix in wrong),
        )


def _megatron_violations(launch: Launch) -> list[tuple[str, str]]:
    """Return what Megatron's batch-invariant mode refuses of this launch, each with the setting that it accepts."""
    experts, dropout = has_experts(launch), launch.real("attention_dropout")
    if dropout is None and launch.framework == "megatron":
        dropout = 0.1  # Megatron-LM's default
    attention, version = launch.get("attention_backend"), launch.number("flash_attention_version")
    conditions = [
        ((launch.number("context_parallel") or 1) > 1, "context parallelism", "context_parallel_size=1"),
        (bool(dropout), f"attention_dropout {dropout:g}" if dropout else "", "attention_dropout=0"),
        (attention not in (None, "flash"), f"attention_backend {attention}", "attention_backend=flash"),
        (version not in (None, 3, 4), f"flash_attention_version {version}", "flash_attention_version=3 or 4"),
        (launch.on("fp16"), "fp16", "bf16"),
        (launch.on("apply_rope_fusion"), "apply_rope_fusion", "apply_rope_fusion=False"),
        (experts and launch.on("moe_permute_fusion"), "moe_permute_fusion", "moe_permute_fusion=False"),
        (experts and _is_other(launch, "moe_token_dispatcher_type", "alltoall"), "another MoE dispatcher", "alltoall"),
        (
            launch.get("transformer_impl") == "inference_optimized"
            and (launch.number("expert_model_parallel_size") or 1) > 1
            and launch.get("inference_moe_token_dispatcher_type") != "nvls",
            "expert parallelism without NVLS",
            "inference_moe_token_dispatcher_type=nvls",
        ),
    ]
    return [(what, fix) for is_wrong, what, fix in conditions if is_wrong]


def _is_other(launch: Launch, key: str, value: str) -> bool:
    return launch.get(key) not in (None, value)


@rule("zero-mismatch-refused", at="zero_train_gen_mismatch")
def nemo_refuses(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if not launch.on("zero_train_gen_mismatch"):
        return
    ranks, engine = launch.number("tensor_parallel") or 1, launch.version("transformer_engine")
    wrong = [(f"tensor_model_parallel_size {ranks}", "tensor_model_parallel_size=1")] * (ranks > 1)
    wrong += [("chunked prefill", "enable_chunked_prefill=false")] * launch.on("enable_chunked_prefill")
    wrong += [("Transformer Engine before 2.18", "transformer-engine>=2.18")] * (
        engine is not None and engine < (2, 18)
    )
    if wrong:
        yield Finding(
            found="zero_train_gen_mismatch with " + ", ".join(what for what, _ in wrong),
            expected=", ".join(fix for _, fix in wrong),
            why="NeMo-RL certifies equal bits of generation and training on one rank of tensor parallelism, with whole "
            "prompts and Transformer Engine 2.18, and refuses the rest (NVIDIA-NeMo/RL#3208).",
            fix=tuple(fix for _, fix in wrong),
        )
