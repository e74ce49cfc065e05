"""Of which model, stage and optimizer a checkpoint is, and whether a run may go on from it."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE
from torchtitan.tools.logging import logger

from whorl.titan.checkpoint_files import Refused

RECORD = "whorl"
PARTS = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, RECORD)
# Settings of a run, not of a model: a checkpoint may be continued with others.
OF_THE_RUN = frozenset(
    [
        *("max_seq_len", "max_batch_size", "global_tokens", "stage", "bootstrap_indexer", "depth_init"),
        *("attention", "attn_type", "attn_mask_type", "moe_impl", "moe_args.use_grouped_mm"),
        *("indexer_loss_coeff", "mtp_loss_coeff", "moe_args.load_balance_coeff", "moe_args._debug_force_load_balance"),
    ]
)


@dataclass(kw_only=True, slots=True)
class Record:
    """Kept in the checkpoint beside TorchTitan's own state: of which model, and of which stage."""

    model: str
    settings: dict[str, Any]
    stage: str
    stage_start: int = 0  # the last step of the stage before

    def state_dict(self) -> dict[str, Any]:
        return {"run": json.dumps(asdict(self), default=str, sort_keys=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What is loaded is read by `read_record`, before anything else."""


def read_record(folder: Path, metadata: Metadata) -> dict[str, Any] | None:
    if f"{RECORD}.run" not in metadata.state_dict_metadata:  # of TorchTitan's own trainer
        return None
    found: dict[str, Any] = {RECORD: {"run": ""}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it was asked for
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return json.loads(found[RECORD]["run"])


def listed(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"


def shapes(states: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(x.shape) for name, x in states.items() if isinstance(x, Tensor)}


def check_model(metadata: Metadata, mine: dict[str, list[int]]) -> None:
    """The tensors of the model are the same, neither more nor fewer."""
    theirs = {
        name: list(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.split(".")[0] not in PARTS
    }
    missing, unknown = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    other = [
        f"{n} ({theirs[n]} there, {mine[n]} here)" for n in sorted(mine.keys() & theirs.keys()) if theirs[n] != mine[n]
    ]
    found = []
    if missing:
        found.append(f"it lacks {listed(missing)}")
    if unknown:
        found.append(f"it has {listed(unknown)}, which this model has not")
    if other:
        found.append(f"shapes differ: {listed(other)}")
    if found:
        raise Refused(f"it is of another model: {'; '.join(found)}")


def flat_settings(record: dict[str, Any]) -> dict[str, Any]:
    found = {"model": record["model"]}
    for name, value in record["settings"].items():
        found |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return found


def check_record(theirs: dict[str, Any], mine: Record, *, accept_changes: bool) -> None:
    if (theirs["stage"], mine.stage) == ("sparse", "warmup"):
        raise Refused(
            "it is of the sparse stage and this run warms up (whorl.stage), which would lose the optimizer's state: "
            "start from its weights with checkpoint.initial_load_path and a new checkpoint.folder"
        )
    before, now = flat_settings(theirs), flat_settings(json.loads(mine.state_dict()["run"]))
    both = sorted(before.keys() & now.keys() - OF_THE_RUN)
    changed = [f"{name} is {before[name]} there, {now[name]} here" for name in both if before[name] != now[name]]
    if changed and not accept_changes:
        raise Refused(f"the model's settings differ: {listed(changed)}. whorl.accept_changes continues all the same")
    for change in changed:
        logger.warning(f"The checkpoint was written with other settings: {change}")


def check_optimizer(metadata: Metadata, names: list[str]) -> None:
    missing = sorted(name for name in names if f"{OPTIMIZER}.{name}" not in metadata.state_dict_metadata)
    if missing:
        raise Refused(
            f"it has no {listed(missing)}: these weights were frozen when it was written, or the optimizer was "
            f"another. checkpoint.exclude_from_loading {OPTIMIZER} starts with a new one"
        )
