"""Checks of the model's config.json: what cannot be read, and the style of the sparse-attention indexer."""

import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from whorl import models
from whorl.contracts import interleaved_range_reason
from whorl.doctor.checks.sections import is_interleaved
from whorl.doctor.launch import Launch, rope_entries
from whorl.doctor.overrides import ROPE_DICTS, inner_config, overrides_of
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import model_file, rope_place, rule
from whorl.rope_config import RopeConfig


@rule("rope-config-invalid", at=rope_place)
def config_refused(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.rope_problem and not _is_explained_by_sections(launch) and _readable_without_rope(launch):
        yield Finding(
            found=launch.rope_problem,
            expected="a rotary configuration that can be computed",
            why="The frequencies of this config are not defined, so no framework can run it.",
            fix="correct the named key" + (" in config.json" if launch.rope_changed_by is None else ""),
        )


@rule("rope-config-unread", "note", at=model_file)
def config_unread(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.rope_problem and not _is_explained_by_sections(launch) and not _readable_without_rope(launch):
        yield Finding(
            found=launch.rope_problem,
            expected="a language model's config.json",
            why="Without the model's rotary sizes only the launch settings are checked.",
            fix="give the missing keys with --set, for example --set head_dim=128",
        )


def _readable_without_rope(launch: Launch) -> bool:
    """Return whether the other keys of the config are readable.

    If so, the rope dictionary is invalid; if not, the doctor does not know this kind of config.
    """
    if launch.uncomputable or rope_entries(launch.text).get("rope_type") == "axial":
        return False  # learned in the checkpoint, or the config of a vision tower alone
    plain = {**(launch.text or {}), "rope_parameters": None, "rope_scaling": None}
    return _read_quietly(plain, "full_attention") is not None


def _read_quietly(text: Mapping[str, Any], layer_type: str) -> RopeConfig | None:
    """Return a RopeConfig without its warnings, which build_launch has recorded; None where it refuses the config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return RopeConfig.from_hf(text, layer_type=layer_type)
        except ValueError:
            return None


def _is_explained_by_sections(launch: Launch) -> bool:
    """Return whether a check of the sections already reports why RopeConfig refused them."""
    sections = launch.sections
    if sections is None or launch.rope is None:
        return False
    wrong_sum = sum(sections) != launch.rope.rotary_dim // 2
    return wrong_sum or (is_interleaved(launch) and interleaved_range_reason(sections) is not None)


@rule("engine-refuses", at=model_file)
def engine_refuses(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    reason = _refusal(launch.inputs.model) if launch.framework == "whorl" and launch.inputs.model else None
    if reason is not None and reason != launch.rope_problem:
        yield Finding(
            found=reason,
            expected="a model that whorl's engine runs",
            why="whorl serve, chat and generate refuse this model before they load it.",
            fix=(
                "docs/models.md lists the architectures that run",
                "or serve it with vLLM: --framework vllm checks that",
            ),
        )


def _refusal(model: Mapping[str, Any]) -> str | None:
    """Return why whorl's engine refuses a config.json, or None.

    Without torch, which the engine's own reader needs, only the architecture is looked at.
    """
    try:
        if find_spec("torch") is None:
            models.architecture(model)
        else:
            models.find(model).config_class.from_hf(model)
    except ValueError as error:
        return str(error)
    return None


@rule("override-without-effect", "warning")
def override_misses_the_text_model(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    inner = inner_config(launch.inputs.model)
    if launch.framework != "vllm" or inner is None:
        return
    settings = {name: s for s in launch.inputs.settings for name in overrides_of(s) if name in ROPE_DICTS}
    for name, setting in settings.items():
        yield Finding(
            where=f"{setting.where} ({setting.path})",
            found=f"{name} for the whole config, while the language model's is in {inner}",
            expected=f"{name} inside {inner}",
            why="vLLM sets the key where the override has it, and the language model does not read it there: it runs "
            "with the frequencies of config.json.",
            fix=f"""--hf-overrides '{{"{inner}": {{"{name}": ...}}}}'""",
        )


@rule("rope-key-ignored", "note", at=rope_place)
def key_without_effect(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    for message in launch.rope_warnings:
        yield Finding(
            found=message,
            expected="keys that the rope type uses",
            why="Most frameworks ignore a misspelt key without an error.",
            fix="check the spelling of these keys",
        )


@rule("rope-family-unknown", "note", at=model_file)
def family_not_known(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.unknown_family is not None:
        yield Finding(
            found=launch.unknown_family,
            expected="a model_type whose rotation is known",
            why="The model's code, not its config, decides which channels pair up and in which direction they rotate.",
            fix="compare one rotated query with the model's own code; the other findings assume Llama's rotation",
        )


@rule("indexer-style")
def indexer_style_differs(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    setting, text = launch.find("indexer_rope_interleave"), launch.text or {}
    value = setting.value if setting else text.get("indexer_rope_interleave")
    if not isinstance(value, bool) or not text.get("index_head_dim"):
        return
    rope = _read_quietly({key: val for key, val in text.items() if key != "indexer_rope_interleave"}, "indexer")
    if rope is not None and (rope.style == "pairs") != value:
        yield Finding(
            where=launch.where("indexer_rope_interleave") if setting else launch.inputs.model_where,
            found=f"indexer_rope_interleave={value} for {text.get('model_type')}",
            expected=f"{not value}: this model's indexer rotates in {rope.style} style",
            why="The indexer of DeepSeek-V3.2 rotates halves although its attention rotates pairs; GLM's indexer "
            "rotates pairs. The wrong style selects wrong tokens, which shows only beyond index_topk (2048) tokens.",
            fix=f"indexer_rope_interleave={not value}",
        )
