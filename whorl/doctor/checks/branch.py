"""Checks of Megatron, Bridge and MindSpeed: the branch of GPTModel that runs, and the fusion switches it allows."""

from collections.abc import Iterator

from whorl.doctor.launch import Launch, dotted
from whorl.doctor.paths import is_fusion_on, is_packed
from whorl.doctor.promises import has_only_text
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule

BRIDGE_SHIM = (0, 5)  # Megatron Bridge 0.5.0 gave the MRoPE class a get_rotary_seq_len
BRIDGE_SECTIONS = (24, 20, 20)  # the default mrope_section of Bridge's Qwen3-VL


def _branch_location(launch: Launch) -> str:
    """Return where position_embedding_type is set, or why it has its value where it is not."""
    is_set = launch.find("position_embedding_type") is not None
    return launch.where("position_embedding_type") if is_set else launch.branch_and_reason[1]


@rule("rope-branch-mismatch", at=_branch_location)
def mrope_model_in_rope_branch(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.uses_megatron and not launch.is_mla and launch.is_mrope and launch.branch != "mrope":
        sections = list(launch.model_sections or launch.sections or BRIDGE_SECTIONS)
        yield Finding(
            found=f"position_embedding_type={launch.branch} for a model whose mrope_section is {sections}",
            expected="position_embedding_type=mrope",
            why="Tokens of text have the same position on all three axes, so the branches agree on them; tokens of "
            "pictures would get one position instead of three."
            if has_only_text(launch)
            else _describe_failure(launch),
            fix=mrope_settings(sections, mindspeed=launch.uses_mindspeed),
            severity="note" if has_only_text(launch) else "error",
        )


def mrope_settings(sections: list[int], *, mindspeed: bool) -> tuple[str, ...]:
    """Return the settings that make GPTModel take the mrope branch."""
    fix = ("position_embedding_type=mrope", f"mrope_section={sections}", "apply_rope_fusion=False")
    return (*fix, "use_fused_rotary_pos_emb off (remove --use-fused-rotary-pos-emb)") if mindspeed else fix


def _describe_failure(launch: Launch) -> str:
    """Say how an MRoPE model fails in the rope branch, which depends on the version of Megatron Bridge."""
    if not launch.uses_bridge:
        return (
            "GPTModel's rope branch calls its rotary object with a sequence length and never reads position_ids: with "
            "Megatron's own RotaryEmbedding every token silently gets one position instead of three, and an MRoPE "
            "object fails because it takes position_ids and mrope_section."
        )
    version = launch.version("megatron_bridge")
    which = "" if not version else "latter" if version >= BRIDGE_SHIM else "former"
    return (
        "Bridge rebuilds rotary_pos_emb as the MRoPE class, but GPTModel._preprocess takes the branch from the "
        "config: before Megatron Bridge 0.5 this ends in AttributeError: 'Qwen3VLMultimodalRotaryEmbedding' object has "
        "no attribute 'get_rotary_seq_len'; from 0.5 on that method exists as a shim, so the same setting fails later: "
        "the object is called with a sequence length, while its forward takes position_ids, mrope_section and "
        "packed_seq_params"
        + (f"; here it is {dotted(version)}, so the {which}" if version else "")
        + ". Neither is a missing operator or CANN package, and adding get_rotary_seq_len yourself does not help."
    )


def _uses_core_mrope(launch: Launch) -> bool:
    """Return whether the launch settings select Megatron Core's own MRoPE. A config.json alone does not."""
    is_set = launch.find("position_embedding_type") is not None
    return launch.uses_megatron and not launch.uses_bridge and is_set and launch.branch == "mrope"


@rule("mrope-without-sections", at=_branch_location)
def mrope_branch_without_sections(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if _uses_core_mrope(launch) and launch.get("mrope_section") is None:
        flag = f"--mrope-section {' '.join(map(str, launch.model_sections or ()))}"
        yield Finding(
            found="the mrope branch without mrope_section",
            expected="three numbers that sum to half the rotary size",
            why="Megatron Core's GPTModel asserts mrope_section; it does not read it from config.json.",
            fix=flag if launch.model_sections else "position_embedding_type=rope, if the model is text-only",
        )


@rule("rope-branch-mismatch", at=_branch_location)
def text_model_in_mrope_branch(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_text = launch.text is not None and launch.rope is not None and not launch.is_mrope
    if launch.uses_megatron and is_text and launch.branch == "mrope":
        yield Finding(
            found="position_embedding_type=mrope for a model without mrope_section in its config",
            expected="position_embedding_type=rope",
            why="The mrope branch needs position_ids of three axes and mrope_section; this model has one axis.",
        )


@rule("fused-rope-needs-rope", at="use_fused_rotary_pos_emb")
def mindspeed_switch_outside_rope(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    branch, because = launch.branch_and_reason
    if launch.uses_megatron and launch.on("use_fused_rotary_pos_emb") and branch != "rope":
        yield Finding(
            found=f"use_fused_rotary_pos_emb with {because}",
            expected="position_embedding_type=rope, or the switch off",
            why="MindSpeed raises AssertionError while it validates arguments: its fused operator rotates by one table "
            "computed from a sequence length and does not support position axes.",
            fix=launch.removal("use_fused_rotary_pos_emb"),
        )


@rule("rope-fusion-with-mrope", at="apply_rope_fusion")
def fusion_switch_with_mrope(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    on_mindspeed_mm = launch.framework == "mindspeed-mm" and launch.is_mrope
    in_branch = launch.uses_megatron and launch.branch == "mrope"
    refuses = launch.uses_bridge or on_mindspeed_mm
    # Megatron Core fuses a batch of 1; the check mrope-batch-unfused covers larger batches.
    fails = refuses or is_packed(launch)
    if not (in_branch or on_mindspeed_mm) or not launch.on("apply_rope_fusion") or not fails:
        return
    function = (
        "MindSpeed-MM's mcore models use an apply_rotary_pos_emb_absolute that"
        if on_mindspeed_mm
        else "Bridge's apply_rotary_pos_emb_absolute"
    )
    offsets = (
        "Megatron Core's unfused THD code gives every packed sequence its own rows of the merged frequencies; the "
        "fused call passes the frequencies on without the sequences' offsets."
    )
    yield Finding(
        found="apply_rope_fusion=True in the mrope branch" + ("" if refuses else " with packed sequences"),
        expected="apply_rope_fusion=False",
        why=f"{function} asserts that apply_rope_fusion is off." if refuses else offsets,
        fix="apply_rope_fusion=False (--no-rope-fusion)",
        severity="error" if refuses else "warning",
    )


@rule("mrope-batch-unfused", "warning", at="micro_batch_size")
def fused_mrope_in_a_batch(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    batch, on_core = launch.number("micro_batch_size") or 1, launch.uses_megatron and not launch.uses_bridge
    is_unfused = launch.branch == "mrope" and not is_packed(launch) and batch != 1
    if on_core and is_unfused and is_fusion_on(launch, "mrope"):
        yield Finding(
            found=f"apply_rope_fusion=True, MRoPE, BSHD and micro_batch_size={batch}",
            expected="THD (packed sequences), micro_batch_size=1, or apply_rope_fusion=False",
            why="Megatron Core 0.16.1 warns and runs the unfused code at every call; the warning says that a later "
            "version will raise an error.",
            fix=("apply_rope_fusion=False", "or pack sequences (THD)"),
        )


@rule("config-overrides-argument", "warning")
def config_hides_argument(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    by_kind = {setting.kind: setting for setting in launch.find_all("position_embedding_type")}
    config, argument = by_kind.get("config"), by_kind.get("argument")
    if launch.uses_megatron and config and argument and config.value != argument.value:
        yield Finding(
            where=f"{config.where} ({config.path})",
            found=f"position_embedding_type={config.value} in the config, {argument.value} in {argument.where}",
            expected="the same value in both",
            why="GPTModel takes position_embedding_type from its config object and uses the argument only where the "
            "config has no such field: the argument is ignored.",
            fix=f"set {config.path} to {argument.value}, or remove it",
        )


@rule("mrope-layout-mismatch", "warning", at=_branch_location)
def core_mrope_is_chunked(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if _uses_core_mrope(launch) and launch.layout not in (None, "chunked"):
        yield Finding(
            found=f"a model with {launch.layout} sections on Megatron Core's MultimodalRotaryEmbedding",
            expected="a rotary class that merges the axes as the model does",
            why="Megatron Core's class gives each axis one contiguous band of channels (chunked). Nothing fails, but "
            "image positions are wrong.",
            fix="use Megatron Bridge's model class, or whorl.adapters.megatron",
        )


@rule("rotary-interleaved-dropped", at="rotary_interleaved")
def thd_fusion_drops_interleaved(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if path.operator == "te_fused_rope_thd" and launch.on("rotary_interleaved"):
        yield Finding(
            found="rotary_interleaved=True, apply_rope_fusion=True and packed sequences",
            expected="apply_rope_fusion=False",
            why="Megatron Core's fused THD call does not pass rotary_interleaved on, so adjacent pairs are rotated as "
            "if they were halves.",
        )


@rule("rope-fusion-with-dsa", at="apply_rope_fusion")
def fusion_with_sparse_attention(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    is_sparse = launch.get("experimental_attention_variant") == "dsa"
    if launch.uses_megatron and is_sparse and launch.on("apply_rope_fusion"):
        yield Finding(
            found="apply_rope_fusion=True with experimental_attention_variant=dsa",
            expected="apply_rope_fusion=False",
            why="Megatron Core asserts that RoPE fusion is off for DSAttention.",
        )


@rule("mla-fusion-needs-yarn", at="rope_type")
def mla_fusion_without_yarn(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    kind = launch.get("rope_type", "yarn")
    if launch.uses_megatron and launch.is_mla and launch.on("apply_rope_fusion") and kind != "yarn":
        yield Finding(
            found=f"apply_rope_fusion=True for multi-latent attention with rope_type={kind}",
            expected="rope_type=yarn, or apply_rope_fusion=False",
            why="Megatron Core raises ValueError: its fused MLA rotation works with YaRN only.",
            fix="apply_rope_fusion=False",
        )


@rule("cp-group-missing", "warning")
def mindspeed_older_than_core(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    core, mindspeed = launch.version("megatron_core") or (), launch.package("mindspeed")
    is_master = mindspeed is not None and "master" in str(mindspeed.value)
    if mindspeed and is_master and launch.on("use_fused_rotary_pos_emb") and core >= (0, 16):
        yield Finding(
            where=mindspeed.where,
            found=f"MindSpeed master with Megatron Core {dotted(core)}",
            expected="MindSpeed's branch core_r0.16.0",
            why="MindSpeed master replaces apply_rotary_pos_emb by a function without cp_group, which Megatron Core "
            "0.16 passes: the call raises TypeError.",
            fix="install MindSpeed from branch core_r0.16.0",
        )


@rule("packed-positions", "warning")
def old_bridge_cannot_pack(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    version, bridge = launch.version("megatron_bridge"), launch.package("megatron_bridge")
    if version and bridge and version < (0, 4) and launch.is_mrope and is_packed(launch):
        yield Finding(
            where=bridge.where,
            found=f"packed sequences with Megatron Bridge {dotted(version)}",
            expected="Megatron Bridge 0.4 or newer",
            why="The rotary classes of Bridge 0.3 do not support packed sequences.",
            fix=("upgrade megatron-bridge", "or do not pack sequences"),
        )
