"""TorchTitan's checkpoints, made whole: a half-written, damaged or foreign one is never taken for a good one.

A checkpoint is whole when its `.metadata`, which torch writes last and at once, names files that are there in full.
The format is torch.distributed.checkpoint's: TorchTitan's own trainer reads what is written here, and the other way.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.tools.logging import logger

from whorl.titan.watch import NotFinite, bad_moments, bad_weights

METADATA = ".metadata"
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
T = TypeVar("T")


class Refused(ValueError):
    """A checkpoint that cannot be continued; the message says what was found and what to do."""


# ---- one checkpoint on disk


def read_metadata(folder: Path) -> Metadata:
    try:
        found = dcp.FileSystemReader(folder).read_metadata()
    except Exception as e:  # a pickle of which a part is missing can raise anything
        raise Refused(f"its {METADATA} cannot be read ({type(e).__name__}: {e})") from e
    if not isinstance(found, Metadata) or not found.storage_data:
        raise Refused(f"its {METADATA} is not torch.distributed.checkpoint's")
    return found


def check_files(folder: Path, metadata: Metadata) -> None:
    """Every file that the metadata names is there, as long as it was written."""
    lengths: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        lengths[place.relative_path] = max(end, lengths.get(place.relative_path, 0))
    for name, length in sorted(lengths.items()):
        path = folder / name
        if not path.is_file():
            raise Refused(f"{name} is missing")
        if path.stat().st_size != length:
            raise Refused(f"{name} has {path.stat().st_size} bytes, written were {length}")


def read_whole(folder: Path) -> Metadata:
    """The metadata of a whole checkpoint; else `Refused` says what is wrong with it."""
    if not (folder / METADATA).is_file():
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        if any(name.endswith(".safetensors") or name.endswith(".safetensors.index.json") for name in names):
            raise Refused("it is a Hugging Face export: load it with checkpoint.initial_load_path and _in_hf")
        if any(name.endswith(".distcp") for name in names) or not names:
            raise Refused(f"it has no {METADATA}: writing it was never finished")
        raise Refused(f"it has no {METADATA} and is no checkpoint of TorchTitan; it has {', '.join(names[:4])}")
    metadata = read_metadata(folder)
    check_files(folder, metadata)
    return metadata


def is_resumable(metadata: Metadata) -> bool:
    return f"{TRAIN_STATE}.step" in metadata.state_dict_metadata


# ---- what a checkpoint is of


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


# ---- ranks


def agree(decide: Callable[[], T]) -> T:
    """Rank 0 decides; all ranks get its answer or its refusal, so that none waits for another."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = decide()
        except Refused as e:
            box[1] = str(e)
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise Refused(box[1])
    return box[0]


def first_of(found: str | None) -> str | None:
    """What the first rank found that found anything; all ranks get it."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return next((each for each in everyone if each is not None), None)


@dataclass(slots=True)
class Wanted:
    """What a run expects to find; pipeline stages have a part of it each."""

    model: dict[str, list[int]] = field(default_factory=dict)
    optimizer: list[str] = field(default_factory=list)

    def over_ranks(self) -> "Wanted":
        """On rank 0: of all ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self, everyone if dist.get_rank() == 0 else None)
        whole = Wanted()
        for part in everyone if dist.get_rank() == 0 else [self]:
            whole.model |= part.model
            whole.optimizer += part.optimizer
        return whole


# ---- the folder of a run


class Checkpoints(CheckpointManager):
    """TorchTitan's, but what is loaded is checked first, and what is written never looks whole before it is.

    begin_stage: called with the step that a stage starts after, before its learning rate is loaded.
    """

    folder: str

    def __init__(
        self,
        *args: Any,
        record: Record,
        begin_stage: Callable[[int], None] = lambda _: None,
        fall_back: bool = False,
        accept_changes: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.record, self.begin_stage = record, begin_stage
        self.fall_back, self.accept_changes = fall_back, accept_changes
        self.states[RECORD] = record
        self._writing = ""
        self._finite: set[int] = set()  # steps whose checkpoint this run looked into
        self._spoilt: dict[int, str] = {}

    # ---- loading

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        if not self.enable:
            return False
        while True:
            chosen = agree(lambda: self._choose(step))
            if not self._load(chosen):
                return False
            bad = first_of(self._not_finite())
            if bad is None:
                self._finite |= {chosen}
                return True
            if chosen < 0:
                raise Refused(f"checkpoint.initial_load_path {self.initial_load_path}: {bad} are not finite")
            self._spoilt[chosen] = f"{bad} are not finite in it"

    def _load(self, chosen: int) -> bool:
        if chosen >= 0:
            return super().load(chosen)
        # TorchTitan takes a folder without a finished checkpoint for a run of its own and forgets initial_load_path.
        folder, self.folder = self.folder, os.path.join(self.folder, "none")
        try:
            return super().load()
        finally:
            self.folder = folder

    def _not_finite(self) -> str | None:
        """What this rank has now that no checkpoint should have."""
        if weights := bad_weights(self.states[MODEL].model):
            return f"weights of {listed(weights)}"
        if moments := bad_moments(self.states[OPTIMIZER]):
            return f"moments of {listed(moments)}"
        return None

    def last_good(self) -> str:
        """For whoever has to go back, as this rank sees the folder."""
        for step in self._steps():
            if step in self._finite and self._why_not(step) is None:
                folder = self._create_checkpoint_id(step)
                return f"{folder} is whole, and its weights and moments were finite when this run last had them"
        return f"this run has no whole checkpoint in {self.folder} to go back to"

    def _steps(self) -> list[int]:
        """Of all folders, newest first."""
        folder = Path(self.folder)
        names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
        return sorted((int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name))), reverse=True)

    def _why_not(self, step: int) -> str | None:
        if step in self._spoilt:
            return self._spoilt[step]
        try:
            metadata = read_whole(Path(self._create_checkpoint_id(step)))
        except Refused as e:
            return str(e)
        if step > 0 and not is_resumable(metadata):
            return "it holds the model alone (checkpoint.last_save_model_only), no optimizer and no place in the data"
        return None

    def _choose(self, step: int) -> int:
        """The step to load; -1: there is none."""
        steps = self._steps()
        if step >= 0:
            if step in steps and (reason := self._why_not(step)):
                raise Refused(f"checkpoint {self._create_checkpoint_id(step)} was asked for, but {reason}")
            newer = [f"step-{s}" for s in steps if s > step]
            if newer:
                logger.warning(f"Loading step {step}; the next start takes {newer[0]}, unless it is removed.")
            return step
        for place, newest in enumerate(steps):
            folder = Path(self._create_checkpoint_id(newest))
            if is_unfinished(folder):
                logger.warning(f"{folder} was never finished (it has no {METADATA}): left out.")
                continue
            reason = self._why_not(newest)
            if reason is None:
                return newest
            older = next((s for s in steps[place + 1 :] if self._why_not(s) is None), None)
            if not self.fall_back or older is None:
                raise Refused(f"checkpoint {folder}: {reason}. {_advice(older)}")
            logger.warning(f"{folder} is left out: {reason}. Falling back to step {older}.")
            return older
        return -1

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        is_full = TRAIN_STATE in state_dict
        wanted = Wanted(shapes(self.states[MODEL].state_dict()))
        if OPTIMIZER in state_dict:
            wanted.optimizer = [name for name in self.states[OPTIMIZER].state_dict() if name.startswith("state.")]
        wanted = wanted.over_ranks()
        record = agree(lambda: self._inspect(Path(checkpoint_id), wanted, is_full)) or {}
        state_dict.pop(RECORD, None)
        if not is_full:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        if record.get("stage", self.record.stage) != self.record.stage:
            self._switch_stage(state_dict, checkpoint_id)
        else:
            self.record.stage_start = record.get("stage_start", 0)
            self.begin_stage(self.record.stage_start)
            if LR_SCHEDULER in state_dict:
                state_dict[LR_SCHEDULER] = self.states[LR_SCHEDULER]
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _inspect(self, folder: Path, wanted: Wanted, is_full: bool) -> dict[str, Any] | None:
        try:
            metadata = read_whole(folder)
            check_model(metadata, wanted.model)
            record = read_record(folder, metadata)
            if record is not None:
                check_record(record, self.record, accept_changes=self.accept_changes)
            if is_full and (record is None or record["stage"] == self.record.stage):
                check_optimizer(metadata, wanted.optimizer)
        except Refused as e:
            raise Refused(f"checkpoint {folder}: {e}") from e
        return record

    def _switch_stage(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """From warm-up to sparse training: the learning rate is new, the moments go on."""
        rest = {k: v for k, v in state_dict.items() if k not in (OPTIMIZER, LR_SCHEDULER)}
        super().dcp_load(rest, checkpoint_id, from_hf=False, from_quantized=False)
        if OPTIMIZER in state_dict:
            self._load_moments(checkpoint_id)
        self.record.stage_start = self.states[TRAIN_STATE].state_dict()["step"]
        self.begin_stage(self.record.stage_start)
        logger.info(f"Stage {self.record.stage} starts after step {self.record.stage_start}.")

    def _load_moments(self, checkpoint_id: str) -> None:
        """Those that were saved; what was frozen begins at zero. Settings, as the learning rate, are this run's."""
        optimizers = self.states[OPTIMIZER]
        saved = dcp.FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
        mine = optimizers.state_dict()
        states = {name: value for name, value in mine.items() if name.startswith("state.")}
        for value in states.values():
            value.zero_()  # torch makes AdamW's state by a step: its counts are 1
        kept = {OPTIMIZER: {name: value for name, value in states.items() if f"{OPTIMIZER}.{name}" in saved}}
        dcp.load(kept, checkpoint_id=checkpoint_id)
        optimizers.load_state_dict(mine | kept[OPTIMIZER])

    # ---- saving

    @torch.no_grad()
    def save(self, curr_step: int, last_step: bool = False) -> None:
        is_due = self._should_save(curr_step, last_step)
        if is_due and (bad := self._not_finite()):
            raise NotFinite(f"step {curr_step}: {bad} are not finite; no checkpoint was written")
        super().save(curr_step, last_step)
        if is_due:
            self._finite |= {curr_step}
            self._spoilt.pop(curr_step, None)  # fallen back from, and written again

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *args: Any, **more: Any
    ) -> Any:
        self._writing = checkpoint_id
        if dist.get_rank() == 0:  # the others write after its plan is known
            remove(Path(checkpoint_id))
        return super().dcp_save(state_dict, checkpoint_id, async_mode, *args, **more)

    def _purge_stale_checkpoints(self) -> None:
        """Keep as many as asked for, but count those that can be loaded: TorchTitan counts unfinished ones, too."""
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        folders = [Path(self._create_checkpoint_id(s)) for s in self._steps()]
        others = [f for f in folders if str(f) != self._writing]
        finished = [f for f in others if not is_unfinished(f)]
        stale = [*finished[self.keep_latest_k - 1 :], *(f for f in others if is_unfinished(f))]
        for folder in stale:
            (folder / METADATA).unlink(missing_ok=True)  # first: what is half removed does not look whole
            self.purge_queue.put(str(folder))


def is_unfinished(folder: Path) -> bool:
    """Nothing but data: torch writes `.metadata` when all of it is there."""
    names = [p.name for p in folder.iterdir()]
    return METADATA not in names and all(n.endswith(".distcp") or n.startswith(METADATA) for n in names)


def remove(folder: Path) -> None:
    (folder / METADATA).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _advice(older: int | None) -> str:
    if older is None:
        return "There is no whole one before it: remove the folder to start anew"
    return f"Remove the folder, or set whorl.fall_back, to continue from step-{older}"
