"""TorchTitan's trainer with checked checkpoints, training stages, and a watch that names the layer of a NaN.

A stage is a part of training with its own learning-rate schedule: first the warm-up, if any, then sparse training.

Start it with `torchtitan.train.main(WhorlTrainer)`: TorchTitan takes the trainer class as an argument.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torchtitan.components.checkpoint import LR_SCHEDULER, CheckpointManager
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from whorl.titan import job_options
from whorl.titan.checkpoint import Checkpoints
from whorl.titan.checkpoint_record import Record
from whorl.titan.config import settings
from whorl.titan.data import ByteTokenizer
from whorl.titan.folder_lock import FolderLock
from whorl.titan.metrics import WhorlMetrics, add_json_lines
from whorl.titan.nan_watch import NaNWatch
from whorl.titan.pipeline import set_num_tokens
from whorl.titan.served_files import describer


class WhorlTrainer(Trainer):
    """TorchTitan's trainer with our checkpoints and watch; raises ValueError when the job cannot run."""

    checkpointer: CheckpointManager

    def __init__(self, job_config: JobConfig) -> None:
        job_options.check(job_config, job_options.world_size())
        # The folders are locked before anything is written. Rank 0 locks for all ranks: no rank can save without it.
        self._locks = [FolderLock(f) for f in job_options.locked_folders(job_config) if job_options.is_first_rank()]
        super().__init__(job_config)
        self._batches: list[dict[str, Any]] = []  # the arguments of every forward and backward of the current step
        # `NaNWatch.attach` has added the attribute to the optimizers, unless optimizer.watch is off.
        self.watch: NaNWatch | None = getattr(self.optimizers, "watch", None)
        if self.watch is not None:
            self.watch.replay, self.watch.replays_backward = self._replay, True
        if job_config.checkpoint.enable:
            self._replace_checkpointer()
        metrics = self.metrics_processor
        self._lines = metrics.lines if isinstance(metrics, WhorlMetrics) else add_json_lines(metrics)
        self._num_steps = 0  # that this process has trained

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        super().train_step(data_iterator)
        self._num_steps += 1

    def train(self) -> None:
        super().train()
        if self._lines is not None:
            self._lines.end(self._num_steps)

    def close(self) -> None:
        super().close()
        for lock in self._locks:
            lock.release()

    # ---- checkpoints

    def _replace_checkpointer(self) -> None:
        """Replace the checkpoint manager that TorchTitan's trainer has built by ours, with the same states."""
        config, options = self.job_config, settings(self.job_config)
        original = self.checkpointer
        original.close()
        checkpoints = Checkpoints(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            checkpoint_config=config.checkpoint,
            sd_adapter=original.sd_adapter,
            base_folder=config.job.dump_folder,
            record=Record(model=config.model.name, settings=dataclasses.asdict(self.model_args), stage=options.stage),
            begin_stage=self._begin_stage,
            describe=self._describer(),
            fall_back=options.fall_back,
            accept_changes=options.accept_changes,
        )
        if self.watch is not None:
            self.watch.last_good = checkpoints.last_good
        self.checkpointer = checkpoints

    def _describer(self) -> Callable[[Path], None]:
        """Return a function that writes the files that `whorl serve` needs beside the weights of a checkpoint."""
        config, values = self.job_config, None
        if (hf_config := getattr(self.model_args, "hf_config", None)) is not None:
            try:
                values = hf_config(config.training.mixed_precision_param)
            except ValueError as error:
                logger.warning(f"Checkpoints get no config.json and cannot be served directly: {error}")
        if values is None:
            return lambda _: None
        is_bytes, assets = isinstance(self.tokenizer, ByteTokenizer), Path(config.model.hf_assets_path)
        return describer(values, is_bytes=is_bytes, assets=assets)

    def _begin_stage(self, start: int) -> None:
        """Replace the learning-rate schedule by one that covers only this stage.

        start: the step after which the stage begins; the stage lasts to the end of training. If it is 0, the schedule
        that TorchTitan has built already covers the stage.
        """
        if start == 0:
            return
        config = self.job_config
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"]
        self.lr_schedulers = self.train_spec.build_lr_schedulers_fn(
            self.optimizers, config.lr_scheduler, max(config.training.steps - start, 1)
        )
        self.checkpointer.states[LR_SCHEDULER] = self.lr_schedulers

    # ---- the watch

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Run forward and backward of one micro-batch as TorchTitan does, and record it for the watch."""
        if self.parallel_dims.pp_enabled:
            set_num_tokens(self.pp_schedule, global_valid_tokens)
        batch = {"input_dict": input_dict, "labels": labels, "global_valid_tokens": global_valid_tokens}
        loss = super().forward_backward_step(**batch)
        if self.watch is not None:
            if self.watch.step != self.step:
                self.watch.step, self._batches = self.step, []
            self._batches.append(batch)
            self.watch.losses.append(loss.detach())
        return loss

    def _replay(self) -> None:
        """Run all micro-batches of the current step again; the watch calls this to find the layer of a NaN."""
        for batch in self._batches:
            super().forward_backward_step(**batch)
