"""Checks of the model's sizes: those that a launch states against config.json, and a launch without config.json."""

import re
from collections.abc import Iterator
from typing import Final

from whorl.doctor.launch import EXPERTS, Launch
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import model_file, rule

# Megatron's flags and the key of config.json that each must equal.
SIZES: Final = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
# Not of the language model: the same names in settings of towers and of other models.
OTHERS: Final = "vision|image|audio|video|encoder|projector|draft|speculative|critic|reward"


@rule("model-size-differs")
def sizes_differ(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if not launch.uses_megatron or launch.text is None:
        return
    pairs = {flag: (_launch_size(launch, flag), _config_size(launch, flag)) for flag in SIZES}
    wrong = {flag: pair for flag, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
    if wrong:
        yield Finding(
            where=launch.where(next(iter(wrong))),
            found=", ".join(f"{flag} {actual}" for flag, (actual, _) in wrong.items()),
            expected=", ".join(str(expected) for _, expected in wrong.values())
            + f", as in {launch.inputs.model_where}",
            why="Megatron builds the model from launch settings alone: the weights that this config.json describes do "
            "not fit it, and a run from scratch trains another model.",
            fix=tuple(f"--{flag.replace('_', '-')} {expected}" for flag, (_, expected) in wrong.items()),
        )


def _launch_size(launch: Launch, flag: str) -> int | None:
    setting, size = launch.find(flag), launch.number(flag)
    if setting is None or size is None or re.search(OTHERS, setting.path.lower()):
        return None
    skipped = str(launch.get("noop_layers") or "").split(",") if flag == "num_layers" else []
    return size - sum(layer.strip().isdigit() for layer in skipped)  # MindSpeed-LLM counts them, config.json does not


def _config_size(launch: Launch, flag: str) -> int | None:
    """Return the size in config.json; None where it has none, or where it is not what the flag means."""
    text = launch.text or {}
    if launch.is_mla and flag in ("num_query_groups", "kv_channels"):
        return None
    experts = next((text[key] for key in EXPERTS if text.get(key)), None)
    if flag == "kv_channels":
        value = launch.rope.head_dim if launch.rope else None
    elif flag == "num_experts":
        value = experts
    elif flag == "ffn_hidden_size" and experts:
        return None  # of dense layers in some launches, of experts in others
    else:
        value = text.get(SIZES[flag])
    return value if isinstance(value, int) else None


@rule("model-not-given", "note", at=model_file)
def no_config(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    sizes = "" if launch.rope is None else f"; by its flags {launch.rope.rotary_dim} of {launch.rope.head_dim} channels"
    if launch.text is None:
        yield Finding(
            found=f"a launch without the model's config.json{sizes}",
            expected="the config.json of the model beside it",
            why="Only what the launch says was checked: not whether it fits the model, nor the model's own "
            "frequencies, sections and lengths.",
            fix="copy config.json into the same folder, and give the folder",
        )
