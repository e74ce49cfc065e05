"""Record the model and the stage of a checkpoint, and check whether a run may continue from it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE
from torchtitan.tools.logging import logger

from whorl.titan.checkpoint_files import BadCheckpoint, read_states

RECORD = "whorl"  # the key of our record among the states of a checkpoint
# The states of a checkpoint besides the model, whose tensors have no such prefix.
PARTS = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, RECORD)
# Settings of a run and not of the model: they may change when a run continues from a checkpoint.
RUN_SETTINGS = frozenset(
    [
        *("max_seq_len", "max_batch_size", "global_tokens", "stage", "bootstrap_indexer", "depth_init"),
        *("attention", "attn_type", "attn_mask_type", "moe_impl", "moe_args.use_grouped_mm"),
        *("indexer_loss_coeff", "mtp_loss_coeff", "moe_args.load_balance_coeff", "moe_args._debug_force_load_balance"),
    ]
)


@dataclass(kw_only=True, slots=True)
class Record:
    """The model, its settings and the stage of a run, saved in the checkpoint beside TorchTitan's state."""

    model: str  # model.name of the job
    settings: dict[str, Any]  # the model arguments as nested dictionaries
    stage: str  # whorl.stage of the job
    stage_start: int = 0  # the last step of the previous stage

    def state_dict(self) -> dict[str, Any]:
        return {"run": json.dumps(asdict(self), default=str, sort_keys=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: `read_record` reads the record before anything is loaded."""


def read_record(folder: Path, metadata: Metadata) -> dict[str, Any] | None:
    """Return the record of a checkpoint, or None when TorchTitan's own trainer wrote it."""
    if f"{RECORD}.run" not in metadata.state_dict_metadata:
        return None
    state: dict[str, Any] = {RECORD: {"run": ""}}
    read_states(state, folder, no_dist=True)
    return json.loads(state[RECORD]["run"])


def join_names(names: list[str]) -> str:
    """Return the first three names as text, and the number of the others."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"


def tensor_shapes(states: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shape of each tensor in a state dict by its name."""
    return {name: list(x.shape) for name, x in states.items() if isinstance(x, Tensor)}


def check_model(metadata: Metadata, expected: dict[str, list[int]]) -> None:
    """Raise `BadCheckpoint` unless the checkpoint has exactly the expected model tensors with the expected shapes."""
    saved = {
        name: list(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.split(".")[0] not in PARTS
    }
    missing, unknown = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    differing = [
        f"{n} is {saved[n]}, expected {expected[n]}"
        for n in sorted(expected.keys() & saved.keys())
        if saved[n] != expected[n]
    ]
    differences = {
        "it lacks {}": missing,
        "it has {}, which this model does not have": unknown,
        "shapes differ: {}": differing,
    }
    if problems := [text.format(join_names(names)) for text, names in differences.items() if names]:
        raise BadCheckpoint(f"it belongs to another model: {'; '.join(problems)}")


def flat_settings(record: dict[str, Any]) -> dict[str, Any]:
    """Return the model and its settings by name, with the settings of nested sections as `section.name`."""
    settings = {"model": record["model"]}
    for name, value in record["settings"].items():
        settings |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return settings


def check_record(saved: dict[str, Any], current: Record, *, accept_changes: bool) -> None:
    """Raise `BadCheckpoint` when a run with the record `current` may not continue from one with the record `saved`.

    accept_changes: only warn about settings of the model that differ.
    """
    if (saved["stage"], current.stage) == ("sparse", "warmup"):
        raise BadCheckpoint(
            "its stage is sparse and whorl.stage is warmup, which would lose the state of the optimizer; "
            "start from its weights with checkpoint.initial_load_path and a new checkpoint.folder"
        )
    before, after = flat_settings(saved), flat_settings(json.loads(current.state_dict()["run"]))
    changed = [
        f"{name} is {before[name]} in the checkpoint and {after[name]} in this run"
        for name in sorted(before.keys() & after.keys() - RUN_SETTINGS)
        if before[name] != after[name]
    ]
    if changed and not accept_changes:
        raise BadCheckpoint(
            f"settings of the model differ: {join_names(changed)}. Set whorl.accept_changes to continue anyway"
        )
    for change in changed:
        logger.warning(f"Continuing from a checkpoint with other settings: {change}")


def check_optimizer(metadata: Metadata, names: list[str]) -> None:
    """Raise `BadCheckpoint` unless the checkpoint has all these optimizer states, such as `state.NAME.exp_avg`."""
    missing = sorted(name for name in names if f"{OPTIMIZER}.{name}" not in metadata.state_dict_metadata)
    if missing:
        raise BadCheckpoint(
            f"it has no {join_names(missing)}: these weights were frozen when it was written, or another optimizer "
            f"wrote it. Set checkpoint.exclude_from_loading to {OPTIMIZER} to start with a new one"
        )
