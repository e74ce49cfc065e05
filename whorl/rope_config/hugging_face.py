"""Convert Hugging Face configurations, in the old and new spelling, to arguments of `RopeConfig.from_keywords`.

A configuration does not state everything: which channels are a pair, in which order they are written back, and the
default base follow from `model_type`. `families.MODELS` has these for every type that
tests/doctor/test_rope_families.py compares with the code of transformers. Any other type is read as Llama's, with an
`UnknownFamilyWarning`.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from .families import DEFAULT_BASE, LLAMA, MODELS, Model
from .scaling import first

# The keys of a rope dict (`rope_parameters`, before transformers 5.0 `rope_scaling`) that RopeConfig reads.
SCALING_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "alpha", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor",
    "high_freq_factor", "short_factor", "long_factor", "short_mscale", "long_mscale", "mrope_section",
    "mrope_interleaved", "xdrope_section", "mixed_b", "apply_yarn_scaling", "use_fope",
}  # fmt: skip
# The keys of the text model inside a composite configuration, outermost first.
TEXT_KEYS = ("thinker_config", "text_config", "llm_config", "language_config")
# The end of two error messages, after the layer types.
_NESTED = ", each with its own rotary embedding: pass layer_type="


class UnknownFamilyWarning(UserWarning):
    """The model_type of a configuration is unknown; it is read as if it rotated as Llama does."""


def keywords(config: Mapping[str, Any] | object, layer_type: str | None) -> dict[str, Any]:
    """Return the arguments of `RopeConfig.from_keywords` for one rotary embedding of a configuration."""
    values = _text_model(config)
    if values.get("model_type") == "llama4_vision_model":
        return _patches(values)
    model = _model(values.get("model_type"))
    values = _layer_values(values, layer_type)
    rope = _rope_dict(values, model, layer_type)
    if rope.get("mrope_section") is None and rope.get("xdrope_section") is None and model.sections:
        rope["mrope_section"] = model.sections
    if model.deepseek_yarn and _type_name(rope) == "yarn":
        name = "deepseek_llama_scaling" if rope.get("apply_yarn_scaling") is False else "deepseek_yarn"
        rope = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": name}
    return {
        **_scaling(rope),
        **_channels(values, rope, model, layer_type == "indexer"),
        "max_position": _number(values, "max_position_embeddings", "n_positions", "seq_length"),
        "layout": _layout(rope, model),
        **_dual_chunk(values),
    }


def _patches(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for Llama 4's vision tower, whose positions are indices of patches."""
    rope = values.get("rope_parameters") or values
    return {
        "rope_type": "mllama4",
        "rope_theta": _real("rope_theta", rope.get("rope_theta", DEFAULT_BASE)),
        "head_dim": _head_dim(values),
        "max_position": (_number(values, "image_size") // _number(values, "patch_size")) ** 2,
        "style": "pairs",
    }


def _model(model_type: str | None) -> Model:
    """Return the defaults of a family. A configuration without a model_type is read as Llama's, without a warning."""
    name = str(model_type).removesuffix("_text")
    if model_type is not None and name not in MODELS:
        warnings.warn(
            f"RopeConfig: model_type {model_type!r} is unknown and is read as Llama's rotation (halves, all channels "
            f"unless the configuration says otherwise); compare it with the model's code before you rely on it",
            UnknownFamilyWarning,
            stacklevel=5,
        )
    return MODELS.get(name, LLAMA)


def _plain(config: Mapping[str, Any] | object) -> Mapping[str, Any]:
    """Return any configuration as a mapping. `to_dict` is preferred: transformers forbids per-layer attributes."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()  # type: ignore[no-any-return]
    if hasattr(config, "__dict__"):
        return vars(config)
    raise ValueError(f"RopeConfig: expected a mapping or a configuration object, found {type(config).__name__}")


def _text_model(config: Mapping[str, Any] | object) -> dict[str, Any]:
    """Return the values of the text model, and for keys that it lacks those of the configurations around it."""
    values = dict(_plain(config))
    while inner := next((values[key] for key in TEXT_KEYS if values.get(key)), None):
        outer = {key: value for key, value in values.items() if key not in TEXT_KEYS}
        values = outer | {key: value for key, value in _plain(inner).items() if value is not None}
    return values


def _layer_values(values: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Return the values with those of one layer type merged in, where the configuration has some (Gemma-4)."""
    if layer_type == "full_attention" and values.get("global_head_dim"):
        return values | {"head_dim": values["global_head_dim"]}
    layers, overrides = values.get("layer_types"), values.get("per_layer_config")
    if not layers or not overrides or layer_type not in layers:
        return values
    by_index = {int(index): value for index, value in overrides.items()}
    return values | dict(by_index.get(layers.index(layer_type)) or {})


def _rope_dict(values: Mapping[str, Any], model: Model, layer_type: str | None) -> dict[str, Any]:
    """Return the rope dict of `layer_type`, with rope_theta and partial_rotary_factor filled in."""
    new, old = (values.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, rope_dict in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(rope_dict, Mapping):
            raise ValueError(f"RopeConfig: {name} is {rope_dict!r}, expected an object with names and values")
    if model.explicit and not new:
        raise ValueError(
            f"RopeConfig: the default frequencies of {values.get('model_type')!r} are not known; "
            f"the configuration needs rope_parameters, found {_first_names(values)}"
        )
    if any(isinstance(value, Mapping) for value in new.values()):
        rope = _pick_layer(new, layer_type)
        base = model.local_base if layer_type == "sliding_attention" and model.local_base else model.base
    else:
        rope = _merge(new, old)
        local = first(values.get("rope_local_base_freq"), model.local_base)
        if local is not None and layer_type not in ("sliding_attention", "full_attention"):
            raise ValueError(
                f"RopeConfig: {values.get('model_type')!r} has sliding_attention and full_attention layers{_NESTED}"
                f"'sliding_attention' or 'full_attention', found {layer_type!r}"
            )
        if local is not None and layer_type == "sliding_attention":
            return {"rope_theta": local}
        base = model.base
    theta = first(rope.get("rope_theta"), values.get("rope_theta"), values.get("rotary_emb_base"), base)
    # ChatGLM stretches the base instead of scaling positions.
    rope["rope_theta"] = _real("rope_theta", theta) * _real("rope_ratio", values.get("rope_ratio") or 1)
    partial = first(rope.get("partial_rotary_factor"), values.get("partial_rotary_factor"), values.get("rotary_pct"))
    rope["partial_rotary_factor"] = partial
    # Phi-3 has the original length outside the rope dict, where it takes precedence.
    original = values.get("original_max_position_embeddings")
    if original is not None and _type_name(rope) != "default":
        rope["original_max_position_embeddings"] = original
    return rope


def _pick_layer(nested: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    layers = sorted(nested)
    if layer_type is None or layer_type not in nested:
        raise ValueError(f"RopeConfig: rope_parameters has {layers}{_NESTED}one of them, found {layer_type!r}")
    if nested[layer_type] is None:
        raise ValueError(f"RopeConfig: rope_parameters[{layer_type!r}] is None: these layers have no rotary embedding")
    return dict(nested[layer_type])


def _merge(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Merge rope_parameters (new) and rope_scaling (old); raises ValueError where they disagree."""
    differ = sorted(key for key in set(new) & set(old) - {"type", "rope_type"} if new[key] != old[key])
    if differ:
        raise ValueError(
            f"RopeConfig: rope_parameters and rope_scaling disagree in {differ}: "
            f"{[new[key] for key in differ]} and {[old[key] for key in differ]}; remove one"
        )
    return {**old, **new}


def _type_name(rope: Mapping[str, Any]) -> str:
    return str(first(rope.get("rope_type"), rope.get("type"), "default"))


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the rope dict that RopeConfig reads; warns of the others."""
    unused = sorted(set(rope) - SCALING_KEYS - {"interleaved"})
    if unused:
        warnings.warn(f"RopeConfig: keys {unused} of the rope dict are ignored: they change no frequency", stacklevel=5)
    return {key: value for key, value in rope.items() if key in SCALING_KEYS}


def _channels(values: Mapping[str, Any], rope: Mapping[str, Any], model: Model, indexer: bool) -> dict[str, Any]:
    """Return head_dim, rotary_dim, and which channels are a pair, of the attention or of the indexer."""
    rotary, nope = values.get("qk_rope_head_dim"), values.get("qk_nope_head_dim")
    # rope_interleave=False makes the families that rotate as DeepSeek-V3 does rotate halves instead of pairs.
    is_half = values.get("rope_interleave") is False and model.pairs_out == "half"
    style = model.indexer_style if indexer else "half" if is_half else model.style
    order: dict[str, Any] = {"style": style, "pairs_out": model.pairs_out if style == "pairs" else "pairs"}
    order |= {"where": "leading"} if indexer else {"where": model.where, "direction": model.direction}
    # MLA states its rotary size; a partial_rotary_factor beside it is ignored.
    size = {"rotary_dim": rotary, "partial_rotary_factor": None}
    if indexer:
        return {"head_dim": _number(values, "index_head_dim"), **size, **order}
    if rotary is not None:
        head_dim = nope + rotary if nope is not None else _number(values, "head_dim", "qk_rope_head_dim")
        return {"head_dim": head_dim, **size, **order}
    partial = first(rope.get("partial_rotary_factor"), None if values.get("rotary_dim") else model.partial)
    size = {"rotary_dim": values.get("rotary_dim"), "partial_rotary_factor": partial}
    return {"head_dim": _head_dim(values), **size, **order}


def _head_dim(values: Mapping[str, Any]) -> int:
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if values.get(name) is not None:
            return _positive_integer(name, values[name])
    hidden, heads = _number(values, "hidden_size", "n_embd"), _number(values, "num_attention_heads", "n_head")
    if hidden % heads:
        raise ValueError(f"RopeConfig: no head_dim, and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def _layout(rope: Mapping[str, Any], model: Model) -> str | None:
    """Return the layout of the sections: the rope dict's mrope_interleaved decides, otherwise the family."""
    if rope.get("mrope_section") is None and rope.get("xdrope_section") is None:
        return None
    interleaved = first(rope.get("mrope_interleaved"), rope.get("interleaved"))
    if interleaved:
        return "spread" if _type_name(rope) == "openpangu" else "interleaved"
    return "chunked" if interleaved is False and model.layout == "interleaved" else model.layout


def _dual_chunk(values: Mapping[str, Any]) -> dict[str, Any]:
    dual = values.get("dual_chunk_attention_config")
    if dual is None:
        return {}
    missing = [key for key in ("chunk_size", "local_size") if key not in dual]
    if missing:
        raise ValueError(f"RopeConfig: dual_chunk_attention_config needs {missing}, found {sorted(dual)}")
    return {"chunk_size": dual["chunk_size"], "local_size": dual["local_size"]}


def _number(values: Mapping[str, Any], *names: str) -> int:
    """Return the first of `names` that the configuration has, as a positive integer; raises ValueError for none."""
    name = next((name for name in names if values.get(name) is not None), None)
    if name is None:
        raise ValueError(f"RopeConfig: the configuration needs {' or '.join(names)}, found {_first_names(values)}")
    return _positive_integer(name, values[name])


def _positive_integer(name: str, value: Any) -> int:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 1:
        raise ValueError(f"RopeConfig: {name} is {value!r}, expected a whole number, 1 or more")
    return int(value)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"RopeConfig: {name} is {value!r}, expected a number")
    return float(value)


def _first_names(names: Iterable[str]) -> list[str]:
    """Return the first twelve names, sorted, for an error message."""
    ordered = sorted(names)
    return [*ordered[:12], "..."] if len(ordered) > 12 else ordered
