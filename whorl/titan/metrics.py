"""Write the metrics of a run: one line of JSON for each logged step in DUMP_FOLDER/metrics.jsonl.

TorchTitan's log, TensorBoard and W&B are unchanged. `whorl.titan.display` reads the file.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from whorl.files import CannotWrite
from whorl.plan.hardware import A3
from whorl.titan.display import FILE

# TorchTitan's names of metrics, and the keys in the file.
NAMES = {
    "loss_metrics/global_avg_loss": "loss",
    "loss_metrics/global_max_loss": "max_loss",
    "grad_norm": "grad_norm",
    "throughput(tps)": "tokens_per_second",  # per device
    "tflops": "tflops",
    "mfu(%)": "mfu",
    "time_metrics/end_to_end(s)": "seconds",
    "time_metrics/data_loading(%)": "data_percent",
    "memory/max_reserved(GiB)": "memory_gib",
    "lr": "lr",
    "n_tokens_seen": "tokens",
    "validation_metrics/loss": "validation_loss",
}
A100 = 312e12  # the peak FLOP/s that TorchTitan assumes for an unknown device
V_SHAPED = ("dualpipev", "zbvzerobubble")  # schedules that go through the ranks forth and back


def peak_flops(device_name: str, assumed: float) -> float | None:
    """Return the peak FLOP/s of a device, None if unknown. assumed: TorchTitan's value, that of an A100 by default."""
    if "Ascend910_93" in device_name:
        return A3.flops
    return assumed if assumed != A100 or "A100" in device_name else None


class JsonLines(BaseLogger):
    """Appends one JSON object for each logged step and flushes it, so that a reader sees every finished step.

    The first line describes the run. knows_peak: whether the device's peak FLOP/s are known; if not, MFU is omitted.
    """

    def __init__(self, path: Path, run: dict[str, Any], *, knows_peak: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._knows_peak = knows_peak
        self._write({"run": run})

    def log(self, metrics: dict[str, Any], step: int) -> None:
        line = {NAMES.get(name, name): _plain(value) for name, value in metrics.items()}
        if not self._knows_peak:
            line.pop("mfu", None)
        self._write({"step": step} | {name: value for name, value in line.items() if value is not None})

    def end(self, num_steps: int) -> None:
        """Note the end of a run that has trained so many steps, logged or not."""
        self._write({"end": {"steps": num_steps}})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise CannotWrite(f"{self._file.name}: cannot be written: {error.strerror}") from error


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and infinities become text."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def metrics_rank(parallel_dims: ParallelDims, job_config: JobConfig) -> int:
    """Return the first rank that has the last pipeline stage and therefore knows the loss.

    A V-shaped schedule ends on the rank where it begins; of these schedules TorchTitan knows only one.
    """
    is_v = job_config.parallelism.pipeline_parallel_schedule.lower() in V_SHAPED
    return 0 if is_v else _get_metrics_rank(parallel_dims, job_config)


def add_json_lines(processor: MetricsProcessor) -> JsonLines | None:
    """Let a metrics processor also write the JSON file, on the rank that knows the loss; None on other ranks."""
    job, dims, name = processor.job_config, processor.parallel_dims, processor.device_memory_monitor.device_name
    if torch.distributed.get_rank() != metrics_rank(dims, job):
        return None
    peak = peak_flops(name, processor.gpu_peak_flops)
    processor.gpu_peak_flops = peak or processor.gpu_peak_flops
    run = {
        "model": job.model.name,
        "flavor": job.model.flavor,
        "converters": job.model.converters,
        "steps": job.training.steps,
        "seq_len": job.training.seq_len,
        "ranks": dims.world_size,
        "device": name,
    }
    lines = JsonLines(Path(job.job.dump_folder) / FILE, run, knows_peak=peak is not None)
    loggers = LoggerContainer()
    loggers.add_logger(processor.logger)
    loggers.add_logger(lines)
    processor.logger = loggers
    return lines


# A function that returns the metrics of a model by name. Every rank calls it with: model parts, dimensions, job config,
# step, and the number of steps since the last call.
Figures = Callable[[Sequence[nn.Module], ParallelDims, JobConfig, int, int], dict[str, float]]


class WhorlMetrics(MetricsProcessor):
    """TorchTitan's metrics processor with the JSON file and the metrics of the model, by its function `figures`.

    A `TrainSpec` gets it with `figures` bound; TorchTitan passes the others.
    """

    def __init__(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        model_args: Any = None,
        tag: str | None = None,
        *,
        figures: Figures,
    ) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self._figures = figures
        self._steps = 0  # steps since the last log
        self.lines = add_json_lines(self)

    def should_log(self, step: int) -> bool:
        self._steps += 1  # the trainer calls this once for each step
        return super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        # Every rank has to call this, because it sums over ranks.
        figures = self._figures(self.model_parts, self.parallel_dims, self.job_config, step, self._steps)
        self._steps = 0
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **figures})
