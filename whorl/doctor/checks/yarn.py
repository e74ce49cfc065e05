"""Checks that the YaRN settings of a launch are those of config.json."""

from collections.abc import Iterator
from typing import NamedTuple

from whorl.doctor.launch import Launch, rope_entries
from whorl.doctor.paths import megatron_branch
from whorl.doctor.report import RotaryPath
from whorl.doctor.rules import Problem, rule
from whorl.rope_config import YARN_TYPES, RopeConfig


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
def yarn_not_in_the_launch(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    if not launch.uses_megatron or rope is None or rope.rope_type not in YARN_TYPES:
        return
    if launch.find("position_embedding_type") is None and not launch.uses_mindspeed_llm:
        return
    branch, because = megatron_branch(launch)
    is_set = launch.get("rope_scaling_type") == "yarn" or launch.get("yarn_rotary_scaling_factor") is not None
    # Megatron's own multi-latent attention applies YaRN by default; MindSpeed-LLM's only with its flags.
    by_default = launch.is_mla and not launch.uses_mindspeed_llm and launch.get("rope_type", "yarn") == "yarn"
    if branch == "yarn" or is_set or by_default:
        return
    fix = _settings(launch, rope)
    yield Problem(
        where=launch.where("rope_type") if launch.is_mla and not launch.uses_mindspeed_llm else because,
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

    def config_value(key: str, default: float) -> float:
        value = entries.get(key)
        return default if value is None else float(value)

    flags = [
        YarnFlag("rope_scaling_original_max_position_embeddings", float(rope.original_max_position or 0), None),
        YarnFlag("beta_fast", config_value("beta_fast", 32.0), 32.0),
        YarnFlag("beta_slow", config_value("beta_slow", 1.0), 1.0),
        YarnFlag("rope_scaling_mscale", config_value("mscale", 1.0), 1.0),
        YarnFlag("rope_scaling_mscale_all_dim", config_value("mscale_all_dim", 0.0), 0.0),
    ]
    # Outside multi-latent attention the factor is max_position_embeddings over the original length.
    return [YarnFlag("rope_scaling_factor", float(rope.factor), 8.0), *flags] if launch.is_mla else flags


@rule("yarn-flags-differ")
def mindspeed_yarn_differs(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    if not launch.uses_megatron or rope is None or launch.get("rope_scaling_type") != "yarn":
        return
    if launch.text is None:
        return  # there is no config.json to differ from
    if rope.rope_type not in YARN_TYPES:
        yield _yarn_only_at_launch(launch)
        return
    wrong = [(flag, text) for flag in _flags(launch, rope) if (text := _difference(launch, flag)) is not None]
    if not launch.is_mla and (text := _difference_of_lengths(launch, rope)) is not None:
        wrong.append((YarnFlag("max_position_embeddings", rope.factor * (rope.original_max_position or 0), None), text))
    if not wrong:
        return
    yield Problem(
        setting=next((flag.key for flag, _ in wrong if launch.find(flag.key)), "rope_scaling_type"),
        found="; ".join(text for _, text in wrong),
        expected="the values of " + launch.inputs.model_where,
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


def _yarn_only_at_launch(launch: Launch) -> Problem:
    return Problem(
        setting="rope_scaling_type",
        found=f"--rope-scaling-type yarn, no YaRN in {launch.inputs.model_where}",
        expected="the model's own frequencies",
        why="The weights were trained without YaRN. To extend the length on purpose, write it into config.json too, so "
        "that inference uses the same scaling.",
        fix=("remove --rope-scaling-type", "or add rope_scaling to config.json"),
        severity="note",
    )
