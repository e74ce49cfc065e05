"""Checks of the vendor's operator on the path: gradient, in-place writes, state, spelling, documented limits."""

from collections.abc import Iterator
from typing import Any, Final

from whorl import contracts
from whorl.contracts import CONTRACTS, SUPPORTED_TORCH_NPU
from whorl.doctor.launch import Launch, dotted, rope_entries
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule
from whorl.doctor.vllm_paths import VLLM_ASCEND_MROPE_SECTIONS, is_310p, is_old
from whorl.rope_config import RopeConfig

COMPILE_KEYS: Final = ("torch_compile", "compile", "use_torch_compile")


@rule("no-gradient")
def operator_without_gradient(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    contract = CONTRACTS.get(path.operator)
    lost = {
        "raises": "backward raises 'not implemented'.",
        "silently lost": "the gradient of q and k is dropped, with a warning at most.",
    }
    if path.role == "train" and contract is not None and contract.gradient in lost:
        yield Finding(
            found=f"{path.operator} in a training forward",
            expected="an operator with a backward: npu_rotary_mul, plain torch, or whorl.ops",
            why=f"torch_npu registers no derivative for {path.operator}: {lost[contract.gradient]}",
            fix=(
                "rotate with npu_rotary_mul and merged cos and sin, or whorl.ops.merge_mrope and rope",
                f"keep {path.operator} for inference",
            ),
        )


@rule("in-place-under-compile", "warning")
def mutation_hidden_from_compile(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    contract = CONTRACTS.get(path.operator)
    compiled = [key for key in COMPILE_KEYS if launch.on(key)]
    compiled += [s.key for s in launch.find_all("enable") if s.path == "compile.enable" and s.value is True]
    if contract is not None and contract.in_place and compiled:
        yield Finding(
            where=launch.where(compiled[0]),
            found=f"{path.operator} under torch.compile",
            expected="a functional operator, or one whose schema declares the mutation",
            why=contract.note,
            fix=(
                "use npu_rotary_mul, or wrap the call in a custom operator that declares mutates_args",
                "or do not compile this part",
            ),
        )


def rotary_tables(launch: Launch) -> list[str]:
    """Return the reasons why this launch has more than one cos/sin table."""
    text = launch.text or {}
    nested = [name for name, value in rope_entries(text).items() if isinstance(value, dict)]
    reasons = [f"rope_parameters per layer type: {', '.join(nested)}"] if len(nested) > 1 else []
    if text.get("rope_local_base_freq") not in (None, text.get("rope_theta")):
        reasons.append("rope_local_base_freq for sliding-window layers")
    speculative = launch.get("speculative_config")
    if isinstance(speculative, dict) and speculative.get("model"):
        reasons.append("a draft model in speculative_config")
    return reasons


@rule("static-cos-sin")
def operator_keeps_first_table(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    tables = rotary_tables(launch)
    # vllm-ascend calls this operator on Atlas 310P, with one pair of cos and sin per process.
    is_recorded_once = path.operator == "npu_apply_rotary_pos_emb" and launch.framework == "vllm"
    if tables and (path.operator == "_npu_rotary_embedding" or is_recorded_once):
        yield Finding(
            found=f"{path.operator} and more than one rotary table ({'; '.join(tables)})",
            expected="an operator that takes its table as an argument of every call",
            why="vllm-ascend keeps one pair of cos and sin per process, recorded by the first layer."
            if is_recorded_once
            else "ATB fills process-wide cos and sin at the first call and never refreshes them: every later table is "
            "ignored without an error.",
            fix="npu_mrope with mrope_section=[0, 0, 0], or Triton (a newer vllm-ascend)",
        )


@rule("partial-rotary")
def operator_rotates_whole_heads(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    rope = launch.rope
    slices_first = launch.framework == "vllm" and is_310p(launch) and not is_old(launch)
    rotates_whole = path.operator in ("_npu_rotary_embedding", "npu_apply_rotary_pos_emb") and not slices_first
    if rope is not None and rope.rotary_dim != rope.head_dim and not launch.is_mla and rotates_whole:
        yield Finding(
            found=f"{path.operator} with rotary size {rope.rotary_dim} of head size {rope.head_dim}",
            expected="a caller that slices the rotary channels off first",
            why="ATB fails with 'Wrong rotaryCoeff'; npu_apply_rotary_pos_emb rotates whole heads (64 or 128).",
            fix=(
                "slice q and k to the rotary size, rotate, concatenate",
                "or use npu_mrope or npu_rotary_mul, which leave the other channels as they are",
            ),
        )


@rule("partial-rotary", at="use_partial_rope")
def mindspeed_partial_fused(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.on("use_partial_rope") and launch.on("use_fused_rotary_pos_emb"):
        yield Finding(
            found="use_partial_rope with use_fused_rotary_pos_emb",
            expected="only one of the two switches",
            why="MindSpeed-LLM raises AssertionError: fused rotary embedding is not supported in partial rope.",
            fix=launch.removal("use_fused_rotary_pos_emb"),
        )


@rule("partial-rotary", at="rotary_percent")
def rotary_percent_disagrees(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    rope, percent = launch.rope, launch.real("rotary_percent")
    if not launch.uses_megatron or rope is None or launch.is_mla or (percent is None and launch.uses_bridge):
        return
    if not launch.find_all("position_embedding_type") and percent is None:
        return
    head, percent = launch.number("kv_channels") or rope.head_dim, 1.0 if percent is None else percent
    rotated = int(head * percent)
    is_applied_twice = head == rope.rotary_dim != rope.head_dim
    # Where the share is right and the head is not, model-size-differs says so.
    is_right_share = not is_applied_twice and rotated * rope.head_dim == rope.rotary_dim * head
    if rotated != rope.rotary_dim and not is_right_share:
        yield Finding(
            found=f"rotary_percent={percent} of {head} channels rotates {rotated}",
            expected=f"{rope.rotary_dim} of {rope.head_dim} channels, as config.json says",
            why="The partial factor is applied twice: a fused kernel then reads past its table "
            "(verl-project/verl#6603)."
            if is_applied_twice
            else "Megatron takes the rotated share from rotary_percent, not from config.json.",
            fix=(
                f"rotary_percent={rope.rotary_dim / rope.head_dim:g}",
                *((f"kv_channels={rope.head_dim}",) if is_applied_twice else ()),
            ),
        )


@rule("positions-not-contiguous", "warning", at="positions_contiguous")
def positions_are_a_view(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if path.operator == "npu_mrope" and launch.get("positions_contiguous") is False:
        yield Finding(
            found="npu_mrope gets positions that are a strided view",
            expected="positions.contiguous()",
            why="A slice or transpose of [3, max_tokens] is not contiguous. Every known caller copies it first; "
            "MindSpeed-MM's verl plugin patches vllm-ascend to do so.",
            fix="torch_npu.npu_mrope(positions.contiguous(), ...)",
        )


@rule("positions-not-contiguous", "note")
def rollout_needs_the_plugin(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.scope == "verl rollout" and path.operator == "npu_mrope" and launch.is_mrope:
        yield Finding(
            found="a verl rollout that calls npu_mrope with three-axis positions",
            expected="positions.contiguous() in vllm_ascend/ops/rotary_embedding.py",
            why="Callers of npu_mrope pass it a contiguous copy; MindSpeed-MM's verl plugin patches vllm-ascend to do "
            "so.",
            fix="look for positions.contiguous() in your vllm-ascend, or install the plugin",
        )


@rule("rotary-mode-spelling")
def interleaved_is_not_a_mode(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_user_code = launch.find("rotary_mode") is not None or launch.find("rotary_operator") is not None
    is_from_vllm = launch.framework == "vllm" and path.operator == "npu_mrope" and not is_user_code
    is_from_vllm = is_from_vllm and not launch.is_mrope and path.style == "pairs"
    if launch.get("rotary_mode") == "interleaved" or is_from_vllm:
        passes = ", which vllm-ascend passes for GPT-J style models" if is_from_vllm else ""
        yield Finding(
            where=launch.where("rotary_mode") if launch.find("rotary_mode") else "",
            found=f"rotary_mode='interleaved'{passes}",
            expected="rotary_mode='interleave'",
            why="torch_npu 2.13 accepts only 'half' and 'interleave'; the web page of npu_mrope says 'interleaved'.",
            fix="install triton-ascend" if is_from_vllm else "rotary_mode=interleave",
        )


@rule("rotary-style-ignored")
def ascend_mrope_is_half(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.framework == "vllm" and path.operator == "npu_mrope" and launch.is_mrope and path.style != "half":
        yield Finding(
            found="vllm-ascend's npu_mrope call for a model that pairs neighbouring channels",
            expected="rotary_mode='interleave'",
            why=f"For mrope_section {list(VLLM_ASCEND_MROPE_SECTIONS)} vllm-ascend passes rotary_mode='half' whatever "
            "the model needs, so the result is silently wrong (vllm-project/vllm-ascend#12765).",
            fix="run vLLM's native forward for this model until vllm-ascend is fixed",
        )


@rule("rotary-offsets", at="long_lora_scaling_factors")
def offsets_on_npu(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    # The native forward, plain torch, adds offsets to the positions.
    if launch.on_ascend and launch.get("long_lora_scaling_factors") is not None and path.operator != "torch":
        is_silent = path.operator == "ascend_rotary_embedding"
        yield Finding(
            found="long_lora_scaling_factors on an NPU",
            expected="adapters of one context length",
            why="Adapters with a scaling of their own pass offsets into a table of several scalings; "
            + ("vllm-ascend's own operator drops them." if is_silent else "vllm-ascend raises NotImplementedError."),
            fix=launch.removal("long_lora_scaling_factors"),
        )


@rule("operator-missing")
def torch_npu_too_old(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    npu, package = launch.version("torch_npu"), launch.package("torch_npu")
    if path.operator != "_npu_rotary_embedding" or npu is None or package is None:
        return
    if npu < (2, 5, 1) or str(package.value).startswith("2.5.1rc"):
        yield Finding(
            where=package.where,
            found=f"{path.operator} on torch_npu {package.value}",
            expected="torch_npu 2.5.1 or newer",
            why="The operator is new in torch_npu 2.5.1; 2.4 and 2.5.1rc1 have no such attribute (Ascend/pytorch#60, "
            "vllm-project/vllm-ascend#379).",
            fix="upgrade torch_npu and CANN together",
        )


@rule("cache-mode-missing")
def cache_mode_too_new(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    npu, cann = launch.version("torch_npu"), launch.version("cann")
    old_npu, old_cann = npu is not None and npu < (2, 10), cann is not None and cann < (9,)
    if path.operator == "npu_mrope" and path.layout == "interleaved" and (old_npu or old_cann):
        version = f"torch_npu {dotted(npu)}" if old_npu else f"CANN {dotted(cann)}"
        yield Finding(
            found=f"interleaved sections through npu_mrope on {version}",
            expected="torch_npu 2.10 or newer and CANN 9.0 or newer",
            why=f"torch_npu 2.9: {SUPPORTED_TORCH_NPU['2.9']}. cache_mode='interleave' also needs CANN's V2 kernel.",
            fix=("upgrade torch_npu and CANN", "or merge the axes first and use npu_rotary_mul"),
        )


@rule("padded-sin-offset", "warning")
def triton_pads_the_rotary_size(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    size = launch.rope.rotary_dim if launch.rope else 0
    if path.operator == "triton_rope" and size & (size - 1):
        yield Finding(
            found=f"vllm-ascend's Triton rotary kernel with rotary size {size}",
            expected="a power of two, or a vllm-ascend with #15688",
            why="The kernel reads sin at an offset of the padded width, so for sizes that are not a power of two it "
            "reads the wrong numbers (vllm-project/vllm-ascend#12723).",
            fix=("update vllm-ascend", "or uninstall triton-ascend, so that npu_mrope runs"),
        )


@rule("dual-chunk-cuda")
def dual_chunk_off_cuda(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.on_ascend and path.branch == "DualChunkRotaryEmbedding":
        yield Finding(
            found="dual_chunk_attention_config on an NPU",
            expected="a CUDA device, or no dual chunk attention",
            why="vLLM's DualChunkRotaryEmbedding builds its tables on the cuda device by name.",
            fix="remove dual_chunk_attention_config from config.json and stay within the trained length",
        )


@rule("operator-limit", "warning")
def documented_limit(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    has_limits = path.operator.startswith("npu_")  # a vendor's documented operator
    reason = _limit(path.operator, launch, launch.rope) if launch.rope and has_limits else None
    if reason is not None:
        yield Finding(
            found=f"{path.operator}: {reason}",
            expected="a call within the operator's documented limits",
            why="The limit is documented for Atlas A2 and A3; outside it the operator fails or its result is not "
            "defined.",
            fix="use plain torch or whorl.ops for this model",
        )


def _limit(operator: str, launch: Launch, rope: RopeConfig) -> str | None:
    """Return the documented limit that this launch's call of an npu_ operator breaks, or None.

    Sizes that do not matter for the limits, such as the number of tokens, are set to 1.
    """
    text = launch.text or {}
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    heads, head, size = int(text.get("num_attention_heads") or 1), rope.head_dim, rope.rotary_dim
    batch, mode = launch.number("micro_batch_size") or 1, "interleave" if launch.style == "pairs" else "half"
    dtypes: dict[str, Any] = {"dtype": dtype, "table_dtype": dtype}
    shapes: dict[str, Any]
    if operator == "npu_mrope":  # as plain RoPE: whorl.doctor.checks.sections checks the sections
        shapes = {"query_shape": (1, heads * head), "key_shape": (1, head), "positions_shape": (1,)}
        return contracts.mrope_limit(**shapes, rotary_dim=size, head_size=head, **dtypes)
    if operator == "npu_interleave_rope":
        return contracts.interleave_rope_limit(shape=(1, heads, 1, size), cos_shape=(1, 1, 1, size), **dtypes)
    if operator == "npu_apply_rotary_pos_emb":
        if size != head:
            return None  # the check `partial-rotary` reports a rotary size below the head size
        shapes = {"query_shape": (1, 1, heads, head), "key_shape": (1, 1, 1, head), "cos_shape": (1, 1, 1, head)}
        return contracts.apply_rotary_pos_emb_limit(**shapes, **dtypes, rotary_mode=mode)
    shape, cos_shape = (batch, heads, 1, size), (batch if launch.is_mrope else 1, 1, 1, size)
    return contracts.rotary_mul_limit(shape=shape, cos_shape=cos_shape, dtype=dtype, rotary_mode=mode, layout="BNSD")
