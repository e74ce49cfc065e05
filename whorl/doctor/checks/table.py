"""Checks of frequencies and tables: lost scaling, YaRN's flags, lengths past the table, low precision, the base."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from whorl.doctor.launch import Launch, rope_entries
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule
from whorl.rope_config import YARN_TYPES, RopeConfig

# Settings that name the precision of angles, frequencies or the buffers that hold them.
ANGLE_DTYPES: Final = ("inv_freq_dtype", "rotary_dtype", "rope_dtype", "angle_dtype", "buffer_dtype")
LOW: Final = ("bf16", "bfloat16", "fp16", "float16", "half", "torch.bfloat16", "torch.float16")


@rule("yarn-factor-ignored", "warning")
def cos_above_one(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    factor = launch.rope.attention_factor if launch.rope else 1.0
    if factor > 1.0 and path.operator in ("npu_rotary_mul", "npu_rotary_position_embedding"):
        yield Finding(
            found=f"{path.operator} with cos and sin times the attention factor {factor:.4g}",
            expected="cos and sin within [-1, 1]",
            why="The operator documents values in [-1, 1]. A factor folded into cos and sin leaves this range; a "
            "factor left out changes the softmax temperature.",
            fix=(
                "multiply the softmax scale by the factor squared instead of cos and sin",
                "or compare with plain torch on your device",
            ),
        )


@rule("yarn-factor-ignored", "warning")
def torchtitan_scales_softmax(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    rope = launch.rope
    if launch.framework != "torchtitan" or rope is None or rope.rope_type not in YARN_TYPES:
        return
    if rope.attention_factor != 1.0:
        yield Finding(
            where=f"{launch.rope_where} (rope_type {rope.rope_type})",
            found=f"an attention factor of {rope.attention_factor:.4g} on torchtitan",
            expected="the factor applied once",
            why="torchtitan keeps the factor out of cos and sin: it belongs in the softmax scale, and a model that "
            "does not put it there loses it.",
            fix="multiply the softmax scale by the factor squared in the attention module",
        )


@rule("rope-scaling-ignored")
def scaling_not_in_the_launch(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    rope = launch.rope
    is_set = launch.find("position_embedding_type") is not None and not launch.uses_bridge
    if not launch.uses_megatron or rope is None or not is_set or launch.on("use_checkpoint_args"):
        return
    key = {"llama3": "use_rope_scaling", "linear": "rotary_seq_len_interpolation_factor"}.get(rope.rope_type)
    if key and launch.get(key) in (None, False) and launch.get("rope_scaling_type") is None:
        flag = f"--{key.replace('_', '-')}"
        of_llama = " --rope-scaling-factor" if rope.rope_type == "llama3" else ""
        yield Finding(
            where=launch.branch_and_reason[1],
            found=f"rope_type {rope.rope_type} (factor {rope.factor:g}) in {launch.inputs.model_where}, {flag} not set",
            expected=flag,
            why="Megatron computes frequencies only from launch settings, so the scaling of config.json is not "
            "applied.",
            fix=f"{flag}{of_llama} {rope.factor:g}",
        )


@rule("rotary-base-differs", at="rotary_base")
def base_differs(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    base, rope = launch.real("rotary_base"), launch.rope
    if rope is not None and base is not None and base != rope.base:
        yield Finding(
            found=f"rotary_base={base:g} at launch, rope_theta {rope.base:g} in {launch.inputs.model_where}",
            expected=f"{rope.base:g}",
            why="Another base gives other frequencies. Nothing fails, but the model attends to the wrong distances.",
            fix=f"rotary_base={rope.base:g}",
        )


@rule("table-too-short", at="sequence_length")
def longer_than_the_table(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    length, rope = launch.number("sequence_length"), launch.rope
    rows, source = _table_rows(launch)
    if length is None or rows is None or length <= rows or (rope is not None and rope.rope_type == "dynamic"):
        return
    yield Finding(
        found=f"a sequence length of {length} with {rows} positions ({source})",
        expected=f"at most {rows}",
        why=_why_too_long(launch),
        fix=f"max_position_embeddings={length}"
        if launch.uses_megatron
        else (f"a length of at most {rows}", "or rope scaling (YaRN) for longer sequences"),
        severity="warning" if launch.framework == "hf" else "error",
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
def angles_in_low_precision(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    for key in ANGLE_DTYPES:
        setting = launch.find(key)
        if setting is not None and str(setting.value).lower() in LOW:
            buffers = " This setting casts every buffer, including inv_freq." if key == "buffer_dtype" else ""
            yield Finding(
                where=launch.where(key),
                found=f"{key}={setting.value}",
                expected="float32 for inv_freq, positions and their product",
                why="bfloat16 represents integers exactly only up to 256: at 128k positions the error of cos reaches "
                f"2.0, against 0.002 when only the finished cos is cast.{buffers}",
                fix=f"{setting.path.lstrip('+-')}=fp32",
            )


class YarnFlag(NamedTuple):
    """A flag of MindSpeed-LLM.

    expected: the value that reproduces config.json; default: MindSpeed-LLM's, None where the flag has none.
    """

    key: str
    expected: float
    default: float | None

    @property
    def name(self) -> str:
        return f"--{self.key.replace('_', '-')}"


@rule("yarn-factor-ignored")
def yarn_not_in_the_launch(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    rope, on_llm = launch.rope, launch.uses_mindspeed_llm
    if not launch.uses_megatron or rope is None or rope.rope_type not in YARN_TYPES:
        return
    if launch.find("position_embedding_type") is None and not on_llm:
        return
    branch, because = launch.branch_and_reason
    is_set = launch.get("rope_scaling_type") == "yarn" or launch.get("yarn_rotary_scaling_factor") is not None
    # Megatron's own multi-latent attention applies YaRN by default; MindSpeed-LLM's only with its flags.
    by_default = launch.is_mla and not on_llm and launch.get("rope_type", "yarn") == "yarn"
    if branch != "yarn" and not is_set and not by_default:
        fix = _settings(launch, rope)
        yield Finding(
            where=launch.where("rope_type") if launch.is_mla and not on_llm else because,
            found=f"YaRN (factor {rope.factor:g}) in {launch.inputs.model_where}, none at launch",
            expected=f"{fix[0]} with its factor" if len(fix) > 1 else fix[0],
            why="Megatron computes its frequencies only from launch settings: the model runs with unscaled frequencies "
            "and without the attention factor.",
            fix=fix,
        )


def _settings(launch: Launch, rope: RopeConfig) -> tuple[str, ...]:
    """Return the launch settings that reproduce the YaRN of config.json."""
    if launch.uses_mindspeed_llm:
        return ("--rope-scaling-type yarn", *(f"{flag.name} {flag.expected:g}" for flag in _flags(launch, rope)))
    if launch.is_mla:
        return ("rope_type=yarn",)
    return ("position_embedding_type=yarn", f"yarn_rotary_scaling_factor={rope.factor:g}")


def _flags(launch: Launch, rope: RopeConfig) -> list[YarnFlag]:
    """Return the flags that MindSpeed-LLM computes YaRN from."""
    entries = rope_entries(launch.text)
    # By key of the rope dictionary: the flag's prefix, and the default of both.
    keys = {"beta_fast": ("", 32.0), "beta_slow": ("", 1.0)}
    keys |= {"mscale": ("rope_scaling_", 1.0), "mscale_all_dim": ("rope_scaling_", 0.0)}
    original = "rope_scaling_original_max_position_embeddings"
    flags = [YarnFlag(original, float(rope.original_max_position or 0), None)]
    for key, (prefix, default) in keys.items():
        value = entries.get(key)
        flags.append(YarnFlag(f"{prefix}{key}", default if value is None else float(value), default))
    # Outside multi-latent attention the factor is max_position_embeddings over the original length.
    return [YarnFlag("rope_scaling_factor", float(rope.factor), 8.0), *flags] if launch.is_mla else flags


@rule("yarn-flags-differ")
def mindspeed_yarn_differs(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    rope, model_where = launch.rope, launch.inputs.model_where
    if not launch.uses_megatron or rope is None or launch.get("rope_scaling_type") != "yarn":
        return
    if launch.text is None:
        return  # there is no config.json to differ from
    if rope.rope_type not in YARN_TYPES:
        yield Finding(
            where=launch.where("rope_scaling_type"),
            found=f"--rope-scaling-type yarn, no YaRN in {model_where}",
            expected="the model's own frequencies",
            why="The weights were trained without YaRN. To extend the length on purpose, write it into config.json "
            "too, so that inference uses the same scaling.",
            fix=("remove --rope-scaling-type", "or add rope_scaling to config.json"),
            severity="note",
        )
        return
    wrong = [(flag, text) for flag in _flags(launch, rope) if (text := _difference(launch, flag)) is not None]
    if not launch.is_mla and (text := _difference_of_lengths(launch, rope)) is not None:
        wrong.append((YarnFlag("max_position_embeddings", rope.factor * (rope.original_max_position or 0), None), text))
    if wrong:
        yield Finding(
            where=launch.where(next((flag.key for flag, _ in wrong if launch.find(flag.key)), "rope_scaling_type")),
            found="; ".join(text for _, text in wrong),
            expected=f"the values of {model_where}",
            why="MindSpeed-LLM computes YaRN only from its flags. Another value gives other frequencies or another "
            "attention factor, and nothing fails; without the original length the launch raises TypeError.",
            fix=tuple(f"{flag.name} {flag.expected:g}" for flag, _ in wrong),
        )


def _difference(launch: Launch, flag: YarnFlag) -> str | None:
    """Say how the flag differs from config.json; None where it agrees or holds an unresolved shell variable."""
    is_set = launch.find(flag.key) is not None
    actual = launch.real(flag.key) if is_set else flag.default
    if actual == flag.expected or (is_set and actual is None):
        return None
    expected = f"{flag.expected:g} in {launch.inputs.model_where}"
    if is_set:
        return f"{flag.name} {actual:g}, {expected}"
    return f"{flag.name} not set{'' if actual is None else f' (default {actual:g})'}, {expected}"


def _difference_of_lengths(launch: Launch, rope: RopeConfig) -> str | None:
    """Say how the factor that the launch's two lengths imply differs from config.json; None where it agrees."""
    longest = launch.real("max_position_embeddings")
    original = launch.real("rope_scaling_original_max_position_embeddings")
    if not longest or not original or longest / original == rope.factor:
        return None
    return (
        f"a factor of {longest / original:g} (max_position_embeddings {longest:g} over {original:g}), "
        f"{rope.factor:g} in {launch.inputs.model_where}"
    )
