"""Checks of frequencies and tables: lost scaling, lengths past the table, low precision, a different base."""

from collections.abc import Iterator
from typing import Final

from whorl.doctor.launch import Launch
from whorl.doctor.paths import megatron_branch
from whorl.doctor.report import RotaryPath
from whorl.doctor.rules import Problem, rule
from whorl.rope_config import YARN_TYPES

# Settings that name the precision of angles, frequencies or the buffers that hold them.
ANGLE_DTYPES: Final = ("inv_freq_dtype", "rotary_dtype", "rope_dtype", "angle_dtype", "buffer_dtype")
LOW: Final = ("bf16", "bfloat16", "fp16", "float16", "half", "torch.bfloat16", "torch.float16")


@rule("yarn-factor-ignored", "warning")
def cos_above_one(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    operators = ("npu_rotary_mul", "npu_rotary_position_embedding")
    if rope is None or rope.attention_factor <= 1.0 or path.operator not in operators:
        return
    yield Problem(
        found=f"{path.operator} with cos and sin times the attention factor {rope.attention_factor:.4g}",
        expected="cos and sin within [-1, 1]",
        why="The operator documents values in [-1, 1]. A factor folded into cos and sin leaves this range; a factor "
        "left out changes the softmax temperature.",
        fix=(
            "multiply the softmax scale by the factor squared instead of cos and sin",
            "or compare with plain torch on your device",
        ),
    )


@rule("yarn-factor-ignored", "warning")
def torchtitan_scales_softmax(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    if (
        launch.framework != "torchtitan"
        or rope is None
        or rope.rope_type not in YARN_TYPES
        or rope.attention_factor == 1.0
    ):
        return
    yield Problem(
        where=f"{launch.rope_where} (rope_type {rope.rope_type})",
        found=f"an attention factor of {rope.attention_factor:.4g} on torchtitan",
        expected="the factor applied once",
        why="torchtitan keeps the factor out of cos and sin: it belongs in the softmax scale, and a model that does "
        "not put it there loses it.",
        fix="multiply the softmax scale by the factor squared in the attention module",
    )


@rule("rope-scaling-ignored")
def scaling_not_in_the_launch(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    is_set = launch.find("position_embedding_type") is not None and not launch.uses_bridge
    if not launch.uses_megatron or rope is None or not is_set or launch.on("use_checkpoint_args"):
        return
    flags = {"llama3": ("use_rope_scaling",), "linear": ("rotary_seq_len_interpolation_factor",)}
    keys = flags.get(rope.rope_type, ())
    if not keys or launch.get(keys[0]) not in (None, False) or launch.get("rope_scaling_type") is not None:
        return
    flag = f"--{keys[0].replace('_', '-')}"
    yield Problem(
        where=megatron_branch(launch)[1],
        found=f"rope_type {rope.rope_type} (factor {rope.factor:g}) in {launch.inputs.model_where}, {flag} not set",
        expected=flag,
        why="Megatron computes frequencies only from launch settings, so the scaling of config.json is not applied.",
        fix=f"{flag} --rope-scaling-factor {rope.factor:g}"
        if rope.rope_type == "llama3"
        else f"{flag} {rope.factor:g}",
    )


@rule("rotary-base-differs")
def base_differs(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    base, rope = launch.real("rotary_base"), launch.rope
    if rope is None or base is None or base == rope.base:
        return
    yield Problem(
        setting="rotary_base",
        found=f"rotary_base={base:g} at launch, rope_theta {rope.base:g} in {launch.inputs.model_where}",
        expected=f"{rope.base:g}",
        why="Another base gives other frequencies. Nothing fails, but the model attends to the wrong distances.",
        fix=f"rotary_base={rope.base:g}",
    )


@rule("table-too-short")
def longer_than_the_table(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    length, rope = launch.number("sequence_length"), launch.rope
    rows, source = _table_rows(launch)
    if length is None or rows is None or length <= rows or (rope is not None and rope.rope_type == "dynamic"):
        return
    yield Problem(
        setting="sequence_length",
        found=f"a sequence length of {length} with {rows} positions ({source})",
        expected=f"at most {rows}",
        why=_why_too_long(launch),
        fix=f"max_position_embeddings={length}"
        if launch.uses_megatron
        else (f"a length of at most {rows}", "or rope scaling (YaRN) for longer sequences"),
        severity="warning" if launch.framework == "hf" else None,
    )


def _table_rows(launch: Launch) -> tuple[int | None, str]:
    """Return the number of positions of the cos/sin table, and the place that sets it."""
    if launch.uses_megatron:
        return launch.number("max_position_embeddings"), launch.where("max_position_embeddings")
    if launch.rope is None:
        return None, ""
    # Dual chunk attention folds positions, so its table is shorter than the sequences it supports.
    rows = launch.rope.max_position if launch.rope.is_dual_chunk else launch.rope.table_rows
    return rows, f"max_position_embeddings of {launch.inputs.model_where}"


def _why_too_long(launch: Launch) -> str:
    if launch.uses_megatron:
        return "Megatron asserts max_position_embeddings >= seq_length."
    if launch.framework == "hf":
        return "transformers computes cos and sin for any position, but the model was not trained past this length."
    return (
        "vLLM derives the longest sequence from the rotary config and refuses more; a position past the table crashes "
        "the engine (vllm-project/vllm#47407)."
    )


@rule("low-precision-angles", "warning")
def angles_in_low_precision(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    for key in ANGLE_DTYPES:
        setting = launch.find(key)
        if setting is None or str(setting.value).lower() not in LOW:
            continue
        buffers = " This setting casts every buffer, including inv_freq." if key == "buffer_dtype" else ""
        yield Problem(
            where=f"{setting.where} ({setting.path})",
            found=f"{key}={setting.value}",
            expected="float32 for inv_freq, positions and their product",
            why="bfloat16 represents integers exactly only up to 256: at 128k positions the error of cos reaches 2.0, "
            f"against 0.002 when only the finished cos is cast.{buffers}",
            fix=f"{setting.path.lstrip('+-')}=fp32",
        )
