"""TorchTitan's checkpoints, made whole: a half-written, damaged or foreign one is never taken for a good one.

A checkpoint is whole when its `.metadata`, which torch writes last and at once, names files that are there in full.
The format is torch.distributed.checkpoint's: TorchTitan's own trainer reads what is written here, and the other way.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import (
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.tools.logging import logger

from whorl.titan.checkpoint_files import METADATA, Refused, is_resumable, is_unfinished, read_whole, remove
from whorl.titan.checkpoint_record import (
    RECORD,
    Record,
    check_model,
    check_optimizer,
    check_record,
    listed,
    read_record,
    shapes,
)
from whorl.titan.watch import NotFinite, bad_moments, bad_weights

T = TypeVar("T")


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

    begin_stage: called with the step that a stage starts after, before its learning rate is loaded. describe: writes
    beside the weights what a server needs.
    """

    folder: str

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
            self.describe(Path(checkpoint_id))
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


def _advice(older: int | None) -> str:
    if older is None:
        return "There is no whole one before it: remove the folder to start anew"
    return f"Remove the folder, or set whorl.fall_back, to continue from step-{older}"
