"""Checks of the MRoPE sections: their sum, their range, and how npu_mrope reads them."""

from collections.abc import Iterator

from whorl.contracts import FUSED_MROPE_SECTIONS, interleaved_formulas_differ, interleaved_range_reason
from whorl.doctor.launch import Launch, rope_entries
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rope_place, rule

DOCUMENTED = ", ".join(str(list(sections)) for sections in FUSED_MROPE_SECTIONS)


def _sections_location(launch: Launch) -> str:
    if launch.find("mrope_section"):
        return launch.where("mrope_section")
    return f"{launch.rope_where} (mrope_section)" if launch.rope_changed_by is None else launch.rope_where


def is_interleaved(launch: Launch) -> bool:
    """Return whether the axes alternate between channels.

    The config's mrope_interleaved decides where RopeConfig refused the sections.
    """
    if launch.layout is not None:
        return launch.layout == "interleaved"
    return bool(rope_entries(launch.text).get("mrope_interleaved")) or launch.get("cache_mode") == "interleave"


@rule("mrope-section-sum", at=_sections_location)
def sections_do_not_sum(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    sections, rope = launch.sections, launch.rope
    if sections is not None and rope is not None and sum(sections) != rope.rotary_dim // 2:
        yield Finding(
            found=f"mrope_section {list(sections)} sums to {sum(sections)}",
            expected=f"{rope.rotary_dim // 2}, half the rotary size {rope.rotary_dim} (head size {rope.head_dim})",
            why="Each rotary pair belongs to one axis. vLLM asserts the sum; other code leaves pairs out or "
            "reads past the table.",
            fix=("take mrope_section from the model's own config.json", "check head_dim and partial_rotary_factor"),
        )


@rule("mrope-section-differs", at="mrope_section")
def launch_differs_from_model(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    model, setting = launch.model_sections, launch.find("mrope_section")
    if model is not None and setting is not None and launch.sections != model:
        yield Finding(
            found=f"mrope_section {setting.value} at launch, {list(model)} in {launch.rope_where}",
            expected=str(list(model)),
            why="The weights were trained with the sections of config.json. Other sections run without an error and "
            "give image tokens the wrong positions.",
            fix=f"mrope_section={list(model)}",
        )


@rule("mrope-section-dropped", at=rope_place)
def override_drops_sections(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if (dropped := launch.dropped_sections) is not None:
        sections = list(dropped)
        yield Finding(
            found=f"a rope dictionary without mrope_section, in place of {sections} in {launch.inputs.model_where}",
            expected=f"mrope_section {sections} in the override as well",
            why="vLLM replaces the rope dictionary by the override's. Without mrope_section it takes the model for one "
            "of plain positions: nothing fails, and tokens of pictures get one position in place of three.",
            fix=f'add "mrope_section": {sections} to the override, and mrope_interleaved where config.json has it',
        )


@rule("mrope-interleaved-range", at=_sections_location)
def interleaved_sections_too_long(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    sections = launch.sections
    reason = interleaved_range_reason(sections) if sections is not None and is_interleaved(launch) else None
    if sections is None or reason is None:
        return
    if launch.rope is None or sum(sections) == launch.rope.rotary_dim // 2:  # mrope-section-sum reports another sum
        yield Finding(
            found=f"interleaved mrope_section {list(sections)}: {reason}",
            expected="sections whose last H channel 3h-2 and last W channel 3w-1 exist",
            why="Interleaved sections put H at 1::3 and W at 2::3. Channels past the end are lost without an error and "
            "stay with the T axis: [16, 24, 24] gives H and W 21 channels each.",
            fix=(
                "chunked layout (mrope_interleaved false, cache_mode default), if the model is chunked",
                "or other sections",
            ),
        )


@rule("mrope-section-not-fused", "warning", at=_sections_location)
def section_not_documented(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    sections = launch.sections
    is_fused = path.operator == "npu_mrope" and launch.framework != "sglang"  # which passes no sections
    if is_fused and sections is not None and sections not in FUSED_MROPE_SECTIONS:
        yield Finding(
            found=f"npu_mrope with mrope_section {list(sections)}",
            expected=f"one of {DOCUMENTED}",
            why="npu_mrope documents only these sections. With Qwen3.5's [11, 11, 10] users report wrong grounding "
            "(sgl-project/sglang#36959), and the native code lost no throughput there.",
            fix=(
                "use the unfused or Triton path for this model",
                "or compare with it on your device before trusting npu_mrope",
            ),
        )


@rule("mrope-section-not-fused", "note", at=_sections_location)
def section_runs_unfused(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    gate = dict(path.passed_over).get("npu_mrope")
    if launch.on_ascend and path.operator == "torch" and launch.is_mrope and gate is not None:
        yield Finding(
            found=f"mrope_section {list(launch.sections or ())} runs unfused",
            expected="nothing to change: the result is right, only slower",
            why=f"{gate}; its Triton kernel runs interleaved sections where triton-ascend is installed.",
            fix="install triton-ascend, if the sections are interleaved",
        )


@rule("mrope-section-not-fused", "note", at=_sections_location)
def section_needs_triton(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    sections, is_installed = launch.sections, launch.has("triton_ascend") is True
    if not launch.on_ascend or path.operator != "triton_mrope" or sections in (None, *FUSED_MROPE_SECTIONS):
        return
    yield Finding(
        found=f"mrope_section {list(sections or ())}: npu_mrope does not support it, vllm-ascend's Triton kernel does"
        + ("" if is_installed else ", if triton-ascend is installed"),
        expected="nothing to change: the result is right"
        + ("" if is_installed else ", only slower without triton-ascend"),
        why=f"npu_mrope documents only {DOCUMENTED}, and vllm-ascend calls it for [16, 24, 24]. Interleaved sections "
        "go to Triton where triton-ascend is installed, else to plain torch.",
        fix="check with --trace that triton_mrope runs" if is_installed else "install triton-ascend",
    )


@rule("mrope-w-bound", "warning", at=_sections_location)
def vendor_formula_differs(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    sections = launch.sections
    if path.operator != "npu_mrope" or sections is None or len(sections) != 3 or not is_interleaved(launch):
        return
    if interleaved_formulas_differ(sections):
        _, h, w = sections
        yield Finding(
            found=f"npu_mrope, cache_mode=interleave, mrope_section {list(sections)}",
            expected=f"W at 2::3 below 3w = {3 * w}, as transformers does",
            why=f"The vendor's published formula stops W at 3h = {3 * h}, transformers at 3w = {3 * w}. For these "
            "sections they give some channels different axes; for [24, 20, 20] and [11, 11, 10] they agree.",
            fix="merge the axes before the operator (whorl.ops.merge_mrope, or npu_rotary_mul with merged cos and sin)",
        )


@rule("rotary-mode-cache-mode-mixed", at="rotary_mode")
def rotary_mode_for_cache_mode(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    mode, cache = launch.get("rotary_mode"), launch.get("cache_mode")
    is_paired, pairs = str(mode).startswith("interleave"), launch.style == "pairs"
    if launch.rope is not None and mode is not None and is_paired != pairs:
        modes = f"rotary_mode={'interleave' if pairs else 'half'}"
        cache_mode = f"cache_mode={'interleave' if is_interleaved(launch) else 'default'}"
        yield Finding(
            found=f"rotary_mode={mode}" + (f", cache_mode={cache}" if cache is not None else ""),
            expected=f"{modes}, {cache_mode}",
            why="rotary_mode says which two channels form a pair; cache_mode says which axis (T, H, W) a channel "
            f"belongs to. This model pairs channels as {launch.style}"
            + (f" and its axes are {launch.layout}." if launch.layout else "."),
            fix=(modes, cache_mode),
        )


@rule("rotary-mode-cache-mode-mixed", at="cache_mode")
def cache_mode_for_layout(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    cache, expected = launch.get("cache_mode"), "interleave" if launch.layout == "interleaved" else "default"
    if cache not in (None, expected) and launch.is_mrope and launch.layout is not None:
        yield Finding(
            found=f"cache_mode={cache} for {launch.layout} sections",
            expected=f"cache_mode={expected}",
            why="cache_mode=interleave gives H and W every third channel; default gives each axis one contiguous band. "
            "The model was trained with one of them.",
        )


@rule("rotary-mode-cache-mode-mixed", at="rotary_interleaved")
def rotary_interleaved_for_mrope(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_on = launch.on("rotary_interleaved") and launch.style != "pairs"
    if launch.uses_megatron and launch.is_mrope and is_on:
        yield Finding(
            found="rotary_interleaved=True for an MRoPE model of half style",
            expected="rotary_interleaved=False",
            why="rotary_interleaved pairs neighbouring channels; the interleaving of MRoPE is about axes and is not "
            "set here. Megatron Core's MultimodalRotaryEmbedding fails on a view when both are set.",
            fix="rotary_interleaved=False (remove --rotary-interleaved)",
        )
