"""adapter_config.json of a PEFT adapter: which modules it updates, and by which rank and scale.

Every field of PEFT's `LoraConfig` is in one of three lists: `SERVED`, `IGNORED` or `REFUSED`.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..weights.checkpoint import read_object, some

# The fields that decide what is computed.
SERVED = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "target_parameters",
    "fan_in_fan_out",
    "lora_bias",
    "init_lora_weights",
)
# Fields about training, or about other fields that are refused: they change nothing that is computed here.
IGNORED = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "runtime_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
)
# Fields that must be unset (None, False, empty or "none"), and what a value of theirs would mean.
REFUSED = {
    "peft_type": "it is another method than LoRA",
    "use_dora": "DoRA scales the columns of the merged weight, which no product beside the base's computes",
    "alora_invocation_tokens": "an activated LoRA begins in the middle of a prompt",
    "use_qalora": "QA-LoRA pools the channels of its input",
    "use_bdlora": "BD-LoRA has block-diagonal matrices",
    "arrow_config": "Arrow routes between several adapters",
    "velora_config": "VeLoRA changes the product of the first matrix",
    "kasa_config": "KaSA changes the weights of the base",
    "monteclora_config": "MonteCLoRA samples its weights",
    "layer_replication": "it gives the model more layers",
    "trainable_token_indices": "it changes rows of the embedding",
    "modules_to_save": "it replaces whole modules of the base",
    "bias": "it changes biases of the base",
    "megatron_config": "its layers are Megatron's",
    "ensure_weight_tying": "it changes the embedding together with the head",
}
# Ways to start training that leave the base as it is. The others change it, so the saved matrices do not fit the base
# that is served, unless PEFT has converted them, and then it has written `true` here.
INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """The fields of adapter_config.json that decide what is computed."""

    path: Path
    r: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    fan_in_fan_out: bool
    lora_bias: bool
    target_modules: str | Collection[str] | None
    exclude_modules: str | Collection[str]
    target_parameters: Collection[str]
    layers: Collection[int] | None
    layers_pattern: Collection[str]

    @classmethod
    def read(cls, folder: Path) -> "LoraConfig":
        """Read the file of a folder; ValueError if it is none, or asks for what is not served."""
        path = folder / "adapter_config.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no adapter_config.json, expected a folder that PEFT's save_pretrained wrote")
        values = read_object(path)
        _check(path, values)
        layers = values.get("layers_to_transform")
        return cls(
            path=path,
            r=_number(path, "r", values.get("r", 8), whole=True),
            alpha=_number(path, "lora_alpha", values.get("lora_alpha", 8)),
            rank_pattern=_pattern(path, values, "rank_pattern", whole=True),
            alpha_pattern=_pattern(path, values, "alpha_pattern"),
            use_rslora=bool(values.get("use_rslora")),
            fan_in_fan_out=bool(values.get("fan_in_fan_out")),
            lora_bias=bool(values.get("lora_bias")),
            target_modules=_names(path, values, "target_modules"),
            exclude_modules=_names(path, values, "exclude_modules") or (),
            target_parameters=_listed(path, values, "target_parameters"),
            layers=None if layers in (None, []) else [layers] if isinstance(layers, int) else list(layers),
            layers_pattern=_listed(path, values, "layers_pattern"),
        )

    def rank(self, key: str) -> int:
        """Return the rank of a module or parameter, by its name in the model."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, key), self.r)

    def scale(self, key: str) -> float:
        """Return the number that the product of both matrices is multiplied by."""
        rank, alpha = self.rank(key), self.alpha_pattern.get(_pattern_key(self.alpha_pattern, key), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, key: str) -> bool:
        """Return whether the config names a module, by its name in the model. It may name others as well: all-linear
        stands for every linear layer."""
        excluded = self.exclude_modules
        if excluded and (re.fullmatch(excluded, key) if isinstance(excluded, str) else _ends(key, excluded)):
            return False
        if self.target_modules is None:
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules.lower() == "all-linear" or bool(re.fullmatch(self.target_modules, key))
        return _ends(key, self.target_modules) and (self.layers is None or self._layer(key) in self.layers)

    def targets_parameter(self, key: str) -> bool:
        """Return whether the config names a parameter, such as the stacked matrices of experts."""
        return _ends(key, self.target_parameters)

    def _layer(self, key: str) -> int | None:
        """Return the number of the layer that a module belongs to."""
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        match = next((match for pattern in patterns if (match := re.match(pattern, key))), None)
        return None if match is None else int(match[1])


def _check(path: Path, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field that asks for what is not served."""
    for name, reason in REFUSED.items():
        value = values.get(name)
        if value not in (None, False, "none", [], {}) and (name, value) != ("peft_type", "LORA"):
            raise ValueError(f"{path}: {name} is {_short(value)}, which is not served: {reason}; merge the adapter")
    init = values.get("init_lora_weights", True)
    if init not in INITS:
        raise ValueError(
            f"{path}: init_lora_weights is {_short(init)}, which changes the base's weights before training: save the "
            "adapter with path_initial_model_for_weight_conversion, or merge it"
        )
    known = {*SERVED, *IGNORED, *REFUSED}
    if unknown := [name for name, value in values.items() if name not in known and value not in (None, False, [], {})]:
        raise ValueError(f"{path}: {some(unknown)}: not known, so what they change is not either; merge the adapter")


def _ends(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names)


def _pattern_key(patterns: Collection[str], key: str) -> str:
    """Return the first pattern that matches the end of a name, as PEFT does; the name itself if none does."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", key)), key)


def _number(path: Path, name: str, value: Any, *, whole: bool = False) -> Any:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or (whole and value < 1):
        raise ValueError(
            f"{path}: {name} is {_short(value)}, expected {'a whole number above 0' if whole else 'a number'}"
        )
    return value


def _pattern(path: Path, values: Mapping[str, Any], name: str, *, whole: bool = False) -> Mapping[str, Any]:
    patterns = values.get(name) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{path}: {name} is {_short(patterns)}, expected an object with names and numbers")
    for pattern, value in patterns.items():
        _check_regex(path, name, pattern)
        _number(path, f"{name}[{pattern!r}]", value, whole=whole)
    return patterns


def _names(path: Path, values: Mapping[str, Any], name: str) -> str | Collection[str] | None:
    """Return a field that is a regular expression or a list of names."""
    value = values.get(name)
    if isinstance(value, str):
        return _check_regex(path, name, value)
    return None if value is None else _listed(path, values, name)


def _listed(path: Path, values: Mapping[str, Any], name: str) -> Collection[str]:
    value = values.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{path}: {name} is {_short(value)}, expected a list of names")
    return value


def _check_regex(path: Path, name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{path}: {name} is {pattern!r}, which is no regular expression: {error}") from error
    return pattern


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
