"""Apply vLLM's --hf-overrides, its older --rope-... flags and SGLang's overrides to a config as vLLM does."""

import re
from collections.abc import Mapping
from typing import Any, Final

from whorl.doctor.inputs import Inputs
from whorl.doctor.launch import rope_entries, text_config
from whorl.doctor.settings import Setting
from whorl.rope_config.hugging_face import TEXT_KEYS

ROPE_DICTS: Final = ("rope_parameters", "rope_scaling")
ROPE_TYPES: Final = ("rope_type", "type")


def with_overrides(inputs: Inputs) -> tuple[dict[str, Any] | None, Setting | None]:
    """Return the model config as vLLM's --hf-overrides and --rope-... flags change it.

    Also return the last of these settings that changed the rope dictionary, or None.
    """
    if inputs.model is None:
        return None, None
    config, changed_by = dict(inputs.model), None
    overrides: dict[str, Any] = {}
    for setting in inputs.settings:
        overrides = _merge(overrides, overrides_of(setting))
        new = _overridden(inputs.model, overrides)
        if rope_entries(text_config(new)) != rope_entries(text_config(config)):
            changed_by = setting
        config = new
    return config, changed_by


def inner_config(config: Mapping[str, Any] | None) -> str | None:
    """Return the key under which a config has its text model, or None where they are one."""
    return next((name for name in TEXT_KEYS if isinstance((config or {}).get(name), Mapping)), None)


def overrides_of(setting: Setting) -> dict[str, Any]:
    """Return what a setting changes in the config: --hf-overrides JSON, --hf-overrides.a.b 1, or an old --rope flag."""
    if setting.key in ("hf_overrides", "json_model_override_args") and isinstance(setting.value, Mapping):
        return dict(setting.value)
    if dotted := re.search(r"(?:^|\.)hf[-_]overrides\.(.+)", setting.path):
        value = setting.value
        for name in reversed(dotted[1].split(".")):
            value = {name: value}
        return dict(value)
    is_flag = setting.kind == "argument" and setting.key in (*ROPE_DICTS, "rope_theta")
    return {setting.key: setting.value} if is_flag else {}


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries. The two names of the rope dictionary, and of its type, are one key each."""
    merged = dict(base)
    for key, value in changes.items():
        same = next((names for names in (ROPE_DICTS, ROPE_TYPES) if key in names), (key,))
        old = next((merged.pop(name) for name in same if name in merged), None)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply overrides as vLLM does: a config inside the config is merged, any other dictionary is replaced.

    A rope dictionary for the whole config does not reach a text model that is a config of its own.
    """
    new = dict(config)
    for key, value in changes.items():
        if key in TEXT_KEYS and key not in new and isinstance(value, Mapping):
            new = _merge(new, value)  # config.json has the text model's keys outside, transformers' object inside
        elif key.endswith("_config"):
            new = _merge(new, {key: value})
        elif key not in ROPE_DICTS:
            new[key] = value
        elif inner_config(new) is None:
            new = {name: old for name, old in new.items() if name not in ROPE_DICTS}
            new[key] = value
    return new
