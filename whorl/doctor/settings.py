"""A `Setting` is one value of a launch: its name, its value, and the place that sets it."""

import json
from dataclasses import dataclass
from typing import Any, Final, Literal

# Different spellings of one setting share a key; the user's spelling stays in Setting.path.
SPELLINGS: Final = {
    "apply_rope_fusion": "rope_fusion",
    "tensor_parallel": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size tp",
    "context_parallel": "context_parallel_size context_parallel_degree cp_size",
    "sequence_length": "seq_length seq_len max_seq_len max_seq_length max_model_len",
    "micro_batch_size": "local_batch_size ppo_micro_batch_size_per_gpu per_device_train_batch_size",
    "indexer_rope_interleave": "indexer_rope_interleaved dsa_indexer_rope_interleaved index_rope_interleave",
}
KEYS: Final = {spelling: key for key, spellings in SPELLINGS.items() for spelling in spellings.split()}
FlagWords = tuple[str, list[str], str]  # name, words after it, file:line
# Where a setting comes from: a configuration file or Hydra override, a flag, an environment variable, a requirements
# file, or --set.
Kind = Literal["config", "argument", "environment", "version", "set"]


class BadInput(ValueError):
    """An input cannot be read or an option is invalid; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One launch setting.

    path: the name as the user wrote it (a flag, or a dotted path); key: its last part in snake case, with aliases
    resolved, by which the checks look it up; where: file:line or --set.
    """

    key: str
    path: str
    value: Any
    kind: Kind
    where: str


def parse_value(text: str) -> Any:
    """Parse a flag's text as a number, bool, None or JSON; return the text itself where it is none of these."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for parse in (int, float, json.loads):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            continue
    return text


def make_setting(path: str, value: Any, kind: Kind, where: str) -> Setting:
    """Build a Setting whose key is the last part of `path`, without a flag's no_, with aliases resolved."""
    last = path.rsplit(".", 1)[-1].lstrip("+")
    key = last if kind == "environment" else last.replace("-", "_")
    if kind == "argument" and value is False and key.startswith("no_"):
        key = key[3:]
    return Setting(key=KEYS.get(key, key), path=path, value=value, kind=kind, where=where)
