"""Save and load TorchTitan's checkpoints; an incomplete, damaged or mismatched checkpoint is never loaded.

A checkpoint is complete when its `.metadata`, which torch writes last and atomically, names files that exist in full.
It is undamaged when its files have the digests that were written with them.
The format is that of torch.distributed.checkpoint, so that this trainer and TorchTitan's can read each other's files.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torchtitan.components.checkpoint import LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from whorl import digests
from whorl.checkpoint_index import METADATA, read_index
from whorl.titan.checkpoint_files import (
    BadCheckpoint,
    check_digests,
    is_resumable,
    is_unfinished,
    read_complete,
    read_states,
    remove,
    write_states,
)
from whorl.titan.checkpoint_record import (
    RECORD,
    Record,
    check_model,
    check_optimizer,
    check_record,
    join_names,
    read_record,
    tensor_shapes,
)
from whorl.titan.nan_watch import NotFinite, bad_moments, bad_weights

T = TypeVar("T")


# ---- ranks


def agree(decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 only; all ranks return its result or raise its `BadCheckpoint`, so none waits."""
    message: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            message[0] = decide()
        except BadCheckpoint as e:
            message[1] = str(e)
    dist.broadcast_object_list(message)
    if message[1] is not None:
        raise BadCheckpoint(message[1])
    return message[0]


def first_problem(problem: str | None) -> str | None:
    """Gather the problem of each rank, None for none; all ranks return the first one, None when no rank has one."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((text for text in problems if text is not None), None)


@dataclass(slots=True)
class ExpectedState:
    """The tensors that a run expects in a checkpoint; each pipeline stage expects a part of them."""

    model: dict[str, list[int]] = field(default_factory=dict)  # shapes by name
    optimizer: list[str] = field(default_factory=list)  # names

    def over_ranks(self) -> "ExpectedState":
        """Return the union over all ranks on rank 0; on other ranks, what this rank expects."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self, parts if dist.get_rank() == 0 else None)
        union = ExpectedState()
        for part in parts if dist.get_rank() == 0 else [self]:
            union.model |= part.model
            union.optimizer += part.optimizer
        return union


# ---- the folder of a run


class Checkpoints(CheckpointManager):
    """TorchTitan's checkpoint manager with checks: nothing unchecked is loaded, nothing incomplete looks complete.

    record: the model and the training stage (warm-up or sparse) of this run. begin_stage: called with the step after
    which the stage starts, before the state of its learning-rate schedule is loaded. describe: writes the files that a
    server needs into the folder of a step. fall_back and accept_changes are options of `[whorl]`.
    """

    folder: str
    stager: DefaultStager | None

    def __init__(
        self,
        *args: Any,
        record: Record,
        begin_stage: Callable[[int], None] = lambda _: None,
        describe: Callable[[Path], None] = lambda _: None,
        fall_back: bool = False,
        accept_changes: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.record, self.begin_stage, self.describe = record, begin_stage, describe
        self.fall_back, self.accept_changes = fall_back, accept_changes
        self.states[RECORD] = record
        self._writing = ""  # the folder of the last save, which may still be under way
        self._finite: set[int] = set()  # steps whose weights and moments this run has found to be finite
        self._bad_steps: dict[int, str] = {}  # steps that this run has read in vain, and the reason

    # ---- loading

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load a step (-1: the newest), or `initial_load_path` if there is none; return whether anything was loaded.

        Files are compared with their digests before loading, and values are checked after it. A step with other bytes,
        or with values that are not finite, counts as damaged, and another is chosen.
        """
        if not self.enable:
            return False
        while True:
            chosen = agree(lambda: self._choose_step(step))
            problem = first_problem(self._damage(chosen))
            if problem is None:
                if not self._load(chosen):
                    return False
                problem = first_problem(self._not_finite())
            if problem is None:
                self._finite |= {chosen}
                return True
            if chosen < 0:
                raise BadCheckpoint(f"checkpoint.initial_load_path {self.initial_load_path}: {problem}")
            self._bad_steps[chosen] = problem

    def _damage(self, step: int) -> str | None:
        """Return which file of a step, -1 for `initial_load_path`, is damaged; the ranks share its files."""
        folder = Path(self._create_checkpoint_id(step) if step >= 0 else self.initial_load_path or "")
        if not (folder / METADATA).is_file() or (step < 0 and not self.initial_load_path):
            return None  # nothing to load, or Hugging Face's files
        if dist.get_rank() == 0 and not (folder / digests.FILE).is_file():
            logger.warning(f"{folder} has no {digests.FILE}: changed bytes in its files would not be noticed.")
        try:
            check_digests(folder, slice(dist.get_rank(), None, dist.get_world_size()))
        except BadCheckpoint as e:
            return str(e)
        return None

    def _load(self, step: int) -> bool:
        """Load a step; for -1 load `initial_load_path`, if it is set."""
        if step >= 0:
            return super().load(step)
        # TorchTitan ignores initial_load_path when the folder exists, even if no checkpoint in it is finished.
        folder, self.folder = self.folder, os.path.join(self.folder, "none")
        try:
            return super().load()
        finally:
            self.folder = folder

    def _not_finite(self) -> str | None:
        """Return which weights or moments of this rank are not finite, or None when all are finite."""
        if weights := bad_weights(self.states[MODEL].model):
            return f"weights of {join_names(weights)} are not finite"
        if moments := bad_moments(self.states[OPTIMIZER]):
            return f"moments of {join_names(moments)} are not finite"
        return None

    def last_good(self) -> str:
        """Return a sentence that names the newest complete checkpoint with finite values that this rank knows."""
        for step in self._steps():
            if step in self._finite and self._problem(step) is None:
                folder = self._create_checkpoint_id(step)
                return f"the last good checkpoint is {folder}: it is complete, and its weights and moments were finite"
        return f"this run has no complete checkpoint in {self.folder}"

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoint folders, newest first."""
        folder = Path(self.folder)
        names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
        return sorted((int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name))), reverse=True)

    def _problem(self, step: int) -> str | None:
        """Return why a run cannot continue from a step, or None when it can."""
        if step in self._bad_steps:
            return self._bad_steps[step]
        try:
            metadata = read_complete(Path(self._create_checkpoint_id(step)))
        except BadCheckpoint as e:
            return str(e)
        if step > 0 and not is_resumable(metadata):
            return "it has only the model (checkpoint.last_save_model_only), no state of the optimizer and of the data"
        return None

    def _choose_step(self, step: int) -> int:
        """Return the step to load, or -1 when there is none; raises `BadCheckpoint` when it cannot be loaded."""
        steps = self._steps()
        if step >= 0:
            if step in steps and (reason := self._problem(step)):
                raise BadCheckpoint(
                    f"checkpoint.load_step is {step}, and {self._create_checkpoint_id(step)} cannot be loaded: {reason}"
                )
            newer = [f"step-{s}" for s in steps if s > step]
            if newer:
                logger.warning(f"Loading step {step}. The next start loads {newer[0]} unless you remove it.")
            return step
        for position, newest in enumerate(steps):
            folder = Path(self._create_checkpoint_id(newest))
            if is_unfinished(folder):
                logger.warning(f"Skipping {folder}: it is incomplete (it has no {METADATA}).")
                continue
            reason = self._problem(newest)
            if reason is None:
                return newest
            older = next((s for s in steps[position + 1 :] if self._problem(s) is None), None)
            if not self.fall_back or older is None:
                raise BadCheckpoint(f"checkpoint {folder}: {reason}. {_advice(older)}")
            logger.warning(f"Skipping {folder}: {reason}. Falling back to step {older}.")
            return older
        return -1

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a folder into `state_dict`, as TorchTitan does, after it has been checked against this run."""
        if from_hf:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        is_full = TRAIN_STATE in state_dict  # otherwise only the model is loaded
        expected = ExpectedState(tensor_shapes(self.states[MODEL].state_dict()))
        if OPTIMIZER in state_dict:
            expected.optimizer = [name for name in self.states[OPTIMIZER].state_dict() if name.startswith("state.")]
        expected = expected.over_ranks()
        record = agree(lambda: self._inspect(Path(checkpoint_id), expected, is_full)) or {}
        state_dict.pop(RECORD, None)
        if is_full and record.get("stage", self.record.stage) != self.record.stage:
            self._switch_stage(state_dict, checkpoint_id)
            return
        if is_full:
            self.record.stage_start = record.get("stage_start", 0)
            self.begin_stage(self.record.stage_start)
            if LR_SCHEDULER in state_dict:
                state_dict[LR_SCHEDULER] = self.states[LR_SCHEDULER]
        self._read(state_dict, checkpoint_id)

    def _read(self, states: dict[str, Any], folder: str) -> None:
        """Load states and model as TorchTitan does, without running code from the files."""
        try:
            read_states(states, folder)
        except BadCheckpoint as e:
            raise BadCheckpoint(f"checkpoint {folder}: {e}") from e
        self.states[MODEL].load_state_dict(states)

    def _inspect(self, folder: Path, expected: ExpectedState, is_full: bool) -> dict[str, Any] | None:
        """Return the record of a checkpoint, None when it has none; raises `BadCheckpoint` if it does not fit."""
        try:
            metadata = read_complete(folder)
            check_model(metadata, expected.model)
            record = read_record(folder, metadata)
            if record is not None:
                check_record(record, self.record, accept_changes=self.accept_changes)
            if is_full and (record is None or record["stage"] == self.record.stage):
                check_optimizer(metadata, expected.optimizer)
        except BadCheckpoint as e:
            raise BadCheckpoint(f"checkpoint {folder}: {e}") from e
        return record

    def _switch_stage(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """Start the sparse stage from a warm-up checkpoint: a new learning-rate schedule, and the saved moments."""
        other_states = {k: v for k, v in state_dict.items() if k not in (OPTIMIZER, LR_SCHEDULER)}
        self._read(other_states, checkpoint_id)
        if OPTIMIZER in state_dict:
            self._load_moments(checkpoint_id)
        self.record.stage_start = self.states[TRAIN_STATE].state_dict()["step"]
        self.begin_stage(self.record.stage_start)
        logger.info(f"Stage {self.record.stage} starts after step {self.record.stage_start}.")

    def _load_moments(self, checkpoint_id: str) -> None:
        """Load the saved moments; those of parameters that were frozen are zero. The options of the optimizer stay."""
        optimizers = self.states[OPTIMIZER]
        saved = read_index(Path(checkpoint_id)).state_dict_metadata
        current = optimizers.state_dict()
        states = {name: value for name, value in current.items() if name.startswith("state.")}
        for value in states.values():
            value.zero_()  # torch creates AdamW's state by running a step, so that its step counts are 1
        loaded = {OPTIMIZER: {name: value for name, value in states.items() if f"{OPTIMIZER}.{name}" in saved}}
        read_states(loaded, checkpoint_id)
        optimizers.load_state_dict(current | loaded[OPTIMIZER])

    # ---- saving

    @torch.no_grad()
    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if a checkpoint is due at this step; raises NotFinite when a weight or moment is not finite."""
        is_due = self._should_save(curr_step, last_step)
        if is_due and (bad := self._not_finite()):
            raise NotFinite(f"step {curr_step}: {bad}; no checkpoint was written")
        super().save(curr_step, last_step)
        if is_due:
            self._finite |= {curr_step}
            self._bad_steps.pop(curr_step, None)  # the run fell back from this step and wrote it again

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Write a checkpoint as TorchTitan does, with the files for a server and with digests."""
        self._writing = checkpoint_id
        if dist.get_rank() == 0:  # the other ranks write only after rank 0 has made the plan
            remove(Path(checkpoint_id))
            self.describe(Path(checkpoint_id))
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if async_mode != AsyncMode.DISABLED and self.stager is None:  # TorchTitan closes it
            self.stager = DefaultStager(StagingOptions(False, False, False, False))
        result = write_states(state_dict, checkpoint_id, async_mode, getattr(self, "pg", None), self.stager)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def _purge_stale_checkpoints(self) -> None:
        """Remove old checkpoints; keep_latest_k counts only finished ones, where TorchTitan counts all."""
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        folders = [Path(self._create_checkpoint_id(s)) for s in self._steps()]
        candidates = [f for f in folders if str(f) != self._writing]
        finished = [f for f in candidates if not is_unfinished(f)]
        stale = [*finished[self.keep_latest_k - 1 :], *(f for f in candidates if is_unfinished(f))]
        for folder in stale:
            # The metadata is removed first, so that a half removed checkpoint does not look complete.
            (folder / METADATA).unlink(missing_ok=True)
            self.purge_queue.put(str(folder))


def _advice(older: int | None) -> str:
    if older is None:
        return "There is no complete checkpoint before it; remove the folder to start from scratch"
    return f"Remove the folder, or set whorl.fall_back, to continue from step-{older}"
