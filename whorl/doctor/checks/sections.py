"""MRoPE sections: their sum, their reach, and what npu_mrope makes of them."""

from collections.abc import Iterator

from whorl.contracts import FUSED_MROPE_SECTIONS, interleaved_formulas_differ, interleaved_range_reason
from whorl.doctor.report import RotaryPath
from whorl.doctor.rules import Problem, rule
from whorl.doctor.setup import Setup, rope_entries

DOCUMENTED = ", ".join(str(list(sections)) for sections in FUSED_MROPE_SECTIONS)


def _where(setup: Setup) -> str:
    return (
        setup.where("mrope_section") if setup.find("mrope_section") else f"{setup.inputs.model_where} (mrope_section)"
    )


def is_interleaved(setup: Setup) -> bool:
    """Whether the axes alternate. The config's word counts where RopeConfig could not be built with its sections."""
    if setup.layout is not None:
        return setup.layout == "interleaved"
    return bool(rope_entries(setup.text).get("mrope_interleaved")) or setup.get("cache_mode") == "interleave"


@rule("mrope-section-sum")
def sections_do_not_sum(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    sections, rope = setup.sections, setup.rope
    if sections is None or rope is None or sum(sections) == rope.rotary_dim // 2:
        return
    yield Problem(
        where=_where(setup),
        found=f"mrope_section {list(sections)} sums to {sum(sections)}",
        expected=f"{rope.rotary_dim // 2}, half the rotary size {rope.rotary_dim} (head size {rope.head_dim})",
        why="Each of the rotary pairs belongs to one axis. vLLM asserts the sum; other code leaves pairs out or reads "
        "past "
        "the table.",
        fix=(f"take mrope_section from the model's config.json: {list(setup.model_sections or ())}",)
        if setup.find("mrope_section") and setup.model_sections
        else ("correct mrope_section, head_dim or partial_rotary_factor in config.json",),
    )


@rule("mrope-section-differs")
def launch_differs_from_model(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    model, launch = setup.model_sections, setup.find("mrope_section")
    if model is None or launch is None or setup.sections == model:
        return
    yield Problem(
        where=setup.where("mrope_section"),
        found=f"mrope_section {launch.value} at launch, {list(model)} in {setup.inputs.model_where}",
        expected=str(list(model)),
        why="The weights were trained with the sections of config.json. Other sections run without an error and give "
        "image "
        "tokens the wrong positions.",
        fix=(f"mrope_section={list(model)}",),
    )


@rule("mrope-interleaved-range")
def interleaving_runs_out(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    sections = setup.sections
    if sections is None or not is_interleaved(setup):
        return
    reason = interleaved_range_reason(sections)
    wrong_sum = setup.rope is not None and sum(sections) != setup.rope.rotary_dim // 2
    if reason is None or wrong_sum:
        return
    yield Problem(
        where=_where(setup),
        found=f"interleaved mrope_section {list(sections)}: {reason}",
        expected="sections whose last H channel 3h-2 and last W channel 3w-1 exist",
        why="Interleaved sections put H at 1::3 and W at 2::3. Channels past the end are lost without an error and "
        "stay "
        "with the T axis: [16, 24, 24] gives H and W 21 channels each.",
        fix=(
            "chunked layout (mrope_interleaved false, cache_mode default), if the model is chunked",
            "or other sections",
        ),
    )


@rule("mrope-section-not-fused", "warning")
def section_not_documented(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    sections = setup.sections
    if path.operator != "npu_mrope" or sections is None or sections in FUSED_MROPE_SECTIONS:
        return
    yield Problem(
        where=_where(setup),
        found=f"npu_mrope with mrope_section {list(sections)}",
        expected=f"one of {DOCUMENTED}",
        why="npu_mrope documents these sections alone. With Qwen3.5's [11, 11, 10] users report wrong grounding "
        "(sgl-project/sglang#36959), and the native code lost no throughput there.",
        fix=(
            "use the unfused or Triton path for this model",
            "or compare with it on your device before trusting npu_mrope",
        ),
    )


@rule("mrope-section-not-fused", "note")
def section_runs_unfused(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    gate = dict(path.passed_over).get("npu_mrope")
    if (
        setup.framework != "vllm"
        or setup.device != "npu"
        or path.operator != "torch"
        or not setup.is_mrope
        or gate is None
    ):
        return
    yield Problem(
        where=_where(setup),
        found=f"mrope_section {list(setup.sections or ())} runs unfused",
        expected="nothing: the result is right, only slower",
        why=gate[0].upper() + gate[1:] + ", and its Triton kernel serves interleaved sections.",
        fix=("install triton-ascend, if the sections are interleaved",),
    )


@rule("mrope-w-bound", "warning")
def vendor_formula_differs(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    sections = setup.sections
    if path.operator != "npu_mrope" or sections is None or len(sections) != 3 or not is_interleaved(setup):
        return
    if not interleaved_formulas_differ(sections):
        return
    _, h, w = sections
    yield Problem(
        where=_where(setup),
        found=f"npu_mrope, cache_mode=interleave, mrope_section {list(sections)}",
        expected=f"W at 2::3 below 3w = {3 * w}, as transformers does",
        why=f"The vendor's published formula stops W at 3h = {3 * h}, transformers at 3w = {3 * w}. For these sections "
        "they "
        "give some channels different axes; for [24, 20, 20] and [11, 11, 10] they agree.",
        fix=("merge the axes before the operator (whorl.ops.mrope, or npu_rotary_mul with merged cos and sin)",),
    )


@rule("rotary-mode-cache-mode-mixed")
def rotary_mode_for_cache_mode(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    mode, cache = setup.get("rotary_mode"), setup.get("cache_mode")
    paired = str(mode).startswith("interleave")
    if setup.rope is None or mode is None or paired == (setup.style == "pairs"):
        return
    expected_cache = "interleave" if is_interleaved(setup) else "default"
    yield Problem(
        where=setup.where("rotary_mode"),
        found=f"rotary_mode={mode}" + (f", cache_mode={cache}" if cache is not None else ""),
        expected=f"rotary_mode={'interleave' if setup.style == 'pairs' else 'half'}, cache_mode={expected_cache}",
        why="rotary_mode says which two channels form a pair; cache_mode says which axis (T, H, W) a channel belongs "
        "to. "
        f"This model pairs channels as {setup.style}" + (f" and its axes are {setup.layout}." if setup.layout else "."),
        fix=(f"rotary_mode={'interleave' if setup.style == 'pairs' else 'half'}", f"cache_mode={expected_cache}"),
    )


@rule("rotary-mode-cache-mode-mixed")
def cache_mode_for_layout(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    cache = setup.get("cache_mode")
    expected = "interleave" if setup.layout == "interleaved" else "default"
    if cache is None or not setup.is_mrope or setup.layout is None or cache == expected:
        return
    yield Problem(
        where=setup.where("cache_mode"),
        found=f"cache_mode={cache} for {setup.layout} sections",
        expected=f"cache_mode={expected}",
        why="cache_mode=interleave gives H and W every third channel; default gives each axis one contiguous band. The "
        "model was trained with one of them.",
        fix=(f"cache_mode={expected}",),
    )


@rule("rotary-mode-cache-mode-mixed")
def rotary_interleaved_for_mrope(setup: Setup, path: RotaryPath) -> Iterator[Problem]:
    if not setup.uses_megatron or not setup.is_mrope or not setup.on("rotary_interleaved") or setup.style == "pairs":
        return
    yield Problem(
        where=setup.where("rotary_interleaved"),
        found="rotary_interleaved=True for an MRoPE model of half style",
        expected="rotary_interleaved=False",
        why="rotary_interleaved pairs neighbouring channels; the interleaving of MRoPE is about axes and is not set "
        "here. "
        "Megatron Core's MultimodalRotaryEmbedding fails on a view when both are asked for.",
        fix=("rotary_interleaved=False (remove --rotary-interleaved)",),
    )
