"""YaRN of config.json against the launch settings that frameworks compute it from."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from whorl.doctor.launch import Launch, rope_entries
from whorl.doctor.paths import megatron_branch
from whorl.doctor.report import RotaryPath
from whorl.doctor.rules import Problem, rule
from whorl.rope_config import RopeConfig

YARN: Final = ("yarn", "deepseek_yarn")


class Flag(NamedTuple):
    """A flag of MindSpeed-LLM: what config.json wants of it, and its default (None: it fails without)."""

    key: str
    wanted: float
    default: float | None

    @property
    def name(self) -> str:
        return f"--{self.key.replace('_', '-')}"


@rule("yarn-factor-ignored")
def yarn_not_in_the_launch(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    if not launch.uses_megatron or rope is None or rope.rope_type not in YARN:
        return
    if launch.find("position_embedding_type") is None and not launch.uses_mindspeed_llm:
        return
    branch, because = megatron_branch(launch)
    carried = launch.get("rope_scaling_type") == "yarn" or launch.get("yarn_rotary_scaling_factor") is not None
    # Megatron's own multi-latent attention scales by default; MindSpeed-LLM's reads the flags.
    by_default = launch.is_mla and not launch.uses_mindspeed_llm and launch.get("rope_type", "yarn") == "yarn"
    if branch == "yarn" or carried or by_default:
        return
    fix = _settings(launch, rope)
    yield Problem(
        where=launch.where("rope_type") if launch.is_mla and not launch.uses_mindspeed_llm else because,
        found=f"YaRN (factor {rope.factor:g}) in {launch.inputs.model_where}, none at launch",
        expected=f"{fix[0]} with its factor" if len(fix) > 1 else fix[0],
        why="Megatron builds its frequencies from launch settings alone: the model runs with unscaled frequencies "
        "and without the attention factor.",
        fix=fix,
    )


def _settings(launch: Launch, rope: RopeConfig) -> tuple[str, ...]:
    """The settings that carry the YaRN of config.json."""
    if launch.uses_mindspeed_llm:
        return ("--rope-scaling-type yarn", *(f"{flag.name} {flag.wanted:g}" for flag in _flags(launch, rope)))
    if launch.is_mla:
        return ("rope_type=yarn",)
    return ("position_embedding_type=yarn", f"yarn_rotary_scaling_factor={rope.factor:g}")


def _flags(launch: Launch, rope: RopeConfig) -> list[Flag]:
    entries = rope_entries(launch.text)

    def written(key: str, default: float) -> float:
        value = entries.get(key)
        return default if value is None else float(value)

    flags = [
        Flag("rope_scaling_original_max_position_embeddings", float(rope.original_max_position or 0), None),
        Flag("beta_fast", written("beta_fast", 32.0), 32.0),
        Flag("beta_slow", written("beta_slow", 1.0), 1.0),
        Flag("rope_scaling_mscale", written("mscale", 1.0), 1.0),
        Flag("rope_scaling_mscale_all_dim", written("mscale_all_dim", 0.0), 0.0),
    ]
    # Outside multi-latent attention the factor is max_position_embeddings over the original length.
    return [Flag("rope_scaling_factor", float(rope.factor), 8.0), *flags] if launch.is_mla else flags


@rule("yarn-flags-differ")
def mindspeed_yarn_differs(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    rope = launch.rope
    if not launch.uses_megatron or rope is None or launch.get("rope_scaling_type") != "yarn":
        return
    if rope.rope_type not in YARN:
        yield _yarn_of_its_own(launch)
        return
    wrong = [(flag, text) for flag in _flags(launch, rope) if (text := _difference(launch, flag)) is not None]
    if not launch.is_mla and (text := _difference_of_lengths(launch, rope)) is not None:
        wrong.append((Flag("max_position_embeddings", rope.factor * (rope.original_max_position or 0), None), text))
    if not wrong:
        return
    yield Problem(
        setting=next((flag.key for flag, _ in wrong if launch.find(flag.key)), "rope_scaling_type"),
        found="; ".join(text for _, text in wrong),
        expected="the values of " + launch.inputs.model_where,
        why="MindSpeed-LLM computes YaRN from its flags alone. Another value is another set of frequencies or another "
        "attention factor, and nothing fails; without the original length it ends in a TypeError.",
        fix=tuple(f"{flag.name} {flag.wanted:g}" for flag, _ in wrong),
    )


def _difference(launch: Launch, flag: Flag) -> str | None:
    """How the flag departs from config.json; None where it agrees or holds a shell variable nobody sets here."""
    is_set = launch.find(flag.key) is not None
    given = launch.real(flag.key) if is_set else flag.default
    if given == flag.wanted or (is_set and given is None):
        return None
    there = f"{flag.wanted:g} in {launch.inputs.model_where}"
    if is_set:
        return f"{flag.name} {given:g}, {there}"
    return f"{flag.name} not set{'' if given is None else f' (default {given:g})'}, {there}"


def _difference_of_lengths(launch: Launch, rope: RopeConfig) -> str | None:
    longest = launch.real("max_position_embeddings")
    original = launch.real("rope_scaling_original_max_position_embeddings")
    if not longest or not original or longest / original == rope.factor:
        return None
    return (
        f"a factor of {longest / original:g} (max_position_embeddings {longest:g} over {original:g}), "
        f"{rope.factor:g} in {launch.inputs.model_where}"
    )


def _yarn_of_its_own(launch: Launch) -> Problem:
    return Problem(
        setting="rope_scaling_type",
        found=f"--rope-scaling-type yarn, no YaRN in {launch.inputs.model_where}",
        expected="the model's own frequencies",
        why="The weights were trained without YaRN. To extend the length on purpose, write it into config.json too, so "
        "that inference scales alike.",
        fix=("remove --rope-scaling-type", "or add rope_scaling to config.json"),
        severity="note",
    )
