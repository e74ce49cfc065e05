"""Read the keys of a rope dict (`rope_parameters`) as fields of RopeConfig, with what follows from other keys."""

import math
from collections.abc import Mapping
from typing import Any

from .checks import REQUIRED, UNCOMPUTABLE, YARN_TYPES, check_choice
from .frequencies import yarn_mscale

# "mrope" says only that there are sections, so the frequencies are the default ones; "su" is longrope's first name.
_ALIASES = {"mrope": "default", "su": "longrope"}
# TeleChat3's attention factor grows by 0.07 ln(s), not by YaRN's 0.1 ln(s).
_TELECHAT_SLOPE = 0.7


def first(*values: Any) -> Any:
    """Return the first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def rope_type_of(scaling: Mapping[str, Any]) -> str:
    names = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    kinds = [_ALIASES.get(name, name) for name in names] or ["default"]
    if kinds[0] != kinds[-1]:
        raise ValueError(f"RopeConfig: rope_type {names[0]!r} and type {names[1]!r} disagree; remove one")
    kind = "fope" if scaling.get("use_fope") else kinds[0]
    if kind in UNCOMPUTABLE:
        raise ValueError(f"RopeConfig: {kind!r} cannot be computed from a configuration: {UNCOMPUTABLE[kind]}")
    check_choice("rope_type", kind, tuple(REQUIRED))
    return kind


def sections_of(scaling: Mapping[str, Any]) -> tuple[int, ...] | None:
    values = [tuple(scaling[key]) for key in ("mrope_section", "xdrope_section") if scaling.get(key) is not None]
    if values and values[0] != values[-1]:
        raise ValueError(f"RopeConfig: mrope_section {values[0]} and xdrope_section {values[1]} disagree; remove one")
    return tuple(int(size) for size in values[0]) if values else None


def rotary_size(head_dim: int, rotary_dim: int | None, partial: float | None, rope_type: str) -> int:
    if partial is not None and not 0 < partial <= 1:
        raise ValueError(f"RopeConfig: partial_rotary_factor must be in (0, 1], found {partial}")
    is_full = partial is None or rope_type in ("proportional", "mllama4")
    expected = head_dim if is_full else int(head_dim * float(partial or 1))
    if rotary_dim is None or rotary_dim == expected:
        return expected
    if partial is not None:
        raise ValueError(
            f"RopeConfig: rotary_dim {rotary_dim} disagrees with partial_rotary_factor {partial}, "
            f"which gives {expected} of head_dim {head_dim}"
        )
    return rotary_dim


def scaling_fields(rope_type: str, scaling: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Return the RopeConfig fields of a rope dict, including those that Hugging Face derives from others."""
    original = scaling.get("original_max_position_embeddings")
    if original is None and rope_type in (*YARN_TYPES, "longrope", "llama3"):
        original = max_position
    factor = scaling.get("factor")
    if factor is None:
        factor = max_position / original if original and rope_type != "llama3" else 1.0
    short, long = scaling.get("short_factor"), scaling.get("long_factor")
    ntk_by_alpha = rope_type in ("dynamic", "xdrope") and scaling.get("alpha")
    fields: dict[str, Any] = {
        "original_max_position": original,
        "factor": float(factor),
        "alpha": float(scaling["alpha"]) if ntk_by_alpha else None,
        "attention_factor": _attention_factor(rope_type, scaling, float(factor), original),
        "long_attention_factor": scaling.get("long_mscale") if rope_type == "longrope" else None,
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "truncate": bool(first(scaling.get("truncate"), True)),
        "mscale": scaling.get("mscale"),
        "mscale_all_dim": scaling.get("mscale_all_dim"),
        "short_factor": None if short is None else tuple(map(float, short)),
        "long_factor": None if long is None else tuple(map(float, long)),
        "mixed_b": float(first(scaling.get("mixed_b"), 1.0)),
    }
    if rope_type == "llama3":
        fields |= {key: float(scaling[key]) for key in ("low_freq_factor", "high_freq_factor")}
    if rope_type == "proportional":
        fields["proportion"] = float(first(scaling.get("partial_rotary_factor"), 1.0))
    return fields


def _attention_factor(rope_type: str, scaling: Mapping[str, Any], factor: float, original: int | None) -> float:
    if rope_type not in (*YARN_TYPES, "longrope"):
        return 1.0
    explicit = scaling.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    if rope_type == "telechat3-yarn":
        return yarn_mscale(factor, _TELECHAT_SLOPE)
    if rope_type == "yarn" and scaling.get("apply_yarn_scaling") is False:
        return 1.0
    if rope_type == "longrope":
        short = scaling.get("short_mscale")
        assert original is not None
        derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return derived if short is None else float(short)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if rope_type in ("deepseek_yarn", "deepseek_llama_scaling"):
        return yarn_mscale(factor, first(mscale, 1.0)) / yarn_mscale(factor, first(mscale_all_dim, 0.0))
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)
