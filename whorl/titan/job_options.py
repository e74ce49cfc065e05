"""Check a job before it starts: names exist, degrees fit the ranks, and no option would be ignored.

`whorl train` checks before it starts any rank, so that a mistake is reported at once. Every rank checks again, because
users may start TorchTitan themselves.
"""

import dataclasses
import importlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import model_converter
from torchtitan.protocols import train_spec as specs

from whorl.device import HOST, default_device
from whorl.titan.register import MODELS, model, register

OPTIMIZERS = ("Adam", "AdamW")
DATA = "use whorl.data, whorl.data_suffixes and whorl.tokenizer instead"
NO_TORCHFT = "TorchTitan 0.2.2 supports TorchFT only in another trainer, torchtitan.experiments.ft.train"
QUANTIZE = "quantize."  # prefix of TorchTitan's converters to float8 and MX
# TorchTitan's dimensions, and the options of [parallelism] that set the degree of each.
DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of TorchTitan, or a section with all its options, that has no effect in this trainer."""

    name: str
    why: str  # the reason, for the error message
    only_ours: bool = False  # it has no effect only for our models: those of TorchTitan have loaders that read it


IGNORED = [
    Ignored("fault_tolerance", NO_TORCHFT),
    Ignored("checkpoint.enable_ft_dataloader_checkpoints", NO_TORCHFT),
    Ignored("memory_estimation", "another program of TorchTitan reads it; whorl train --plan estimates memory"),
    Ignored("training.dataset", DATA, only_ours=True),
    Ignored("training.dataset_path", DATA, only_ours=True),
    Ignored("training.dataloader", f"the text is in memory and needs no workers; {DATA}", only_ours=True),
    Ignored(
        "parallelism.context_parallel_rotate_method",
        "an indexer scores all keys before it selects: they are gathered, never rotated",
        only_ours=True,
    ),
    Ignored("validation", "this model has no TorchTitan validator", only_ours=True),
]


# The least value of options that are numbers; the greatest one too, if there is one.
AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("training.steps", "training.seq_len", "training.local_batch_size", "training.gc_freq"), 1),
    **dict.fromkeys(("checkpoint.interval", "metrics.log_freq", "lr_scheduler.total_steps"), 1),
    **dict.fromkeys(("profiling.profile_freq", "profiling.profiler_active"), 1),
    **dict.fromkeys(("comm.init_timeout_seconds", "comm.train_timeout_seconds"), 1),
    **dict.fromkeys(("validation.freq", "validation.seq_len", "validation.local_batch_size"), 1),
    "parallelism.pipeline_parallel_microbatch_size": 1,
    **dict.fromkeys(("training.global_batch_size", "validation.steps", "checkpoint.load_step"), -1),
    **dict.fromkeys(("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "training.max_norm"), 0),
    **dict.fromkeys(("lr_scheduler.warmup_steps", "checkpoint.keep_latest_k", "profiling.profiler_warmup"), 0),
    **dict.fromkeys(("comm.trace_buf_size", "whorl.loss_chunk", "whorl.health_every"), 0),
    **dict.fromkeys(("whorl.indexer_loss_coeff", "whorl.mtp_loss_coeff"), 0),
}
SHARES = (
    *("optimizer.beta1", "optimizer.beta2", "lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"),
    "activation_checkpoint.memory_budget",
)
BETWEEN = {**{name: (least, math.inf) for name, least in AT_LEAST.items()}, **dict.fromkeys(SHARES, (0, 1))}


def read(arguments: Sequence[str]) -> JobConfig:
    """Return the job config of these command-line arguments, as every rank reads it.

    On an unknown option TorchTitan's parser ends the process with exit code 2 and a list of similar options. Raises
    ValueError when the job cannot be read.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the ranks read the job again and log the warnings then
    try:
        return ConfigManager().parse_args(list(arguments))
    except (AssertionError, AttributeError, ImportError, OSError, TypeError) as error:
        raise ValueError(f"the job cannot be read: {type(error).__name__}: {error}") from error
    finally:
        logging.disable(before)


def locked_folders(config: JobConfig) -> list[Path]:
    """Return the folders that only one run at a time may write into."""
    folder = Path(config.job.dump_folder)
    return [folder, folder / config.checkpoint.folder] if config.checkpoint.enable else [folder]


def world_size() -> int:
    """Return the number of ranks of all machines; called in a rank, where torchrun has set WORLD_SIZE."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this is rank 0, also without torchrun, when RANK is not set."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def check(config: JobConfig, num_ranks: int | None) -> None:
    """Raise ValueError when a job cannot run: an unknown name, degrees that do not fit, or an ignored option.

    num_ranks: the ranks of all machines; None when the number is not known yet.
    """
    register()
    _import(config.experimental.custom_import)
    spec = _spec(config.model.name)
    args = _one_of("model.flavor", config.model.flavor, spec.model_args)
    for name in config.model.converters:
        _one_of("model.converters", name, model_converter._registry_model_converter_cls)
    _one_of("optimizer.name", config.optimizer.name, dict.fromkeys(OPTIMIZERS))
    _check_ignored(config)
    _check_numbers(config)
    if config.comm.mode != "default":  # one process simulates all ranks; TorchTitan reads their number from NGPU
        simulated = os.environ.get("NGPU", "")
        num_ranks = int(simulated) if simulated.isdigit() else None
    dims = None if num_ranks is None else parallel_dims(config, num_ranks)
    if dims is not None:
        _check_batch(config, dims)
        _check_schedule(config, dims)
        if config.model.name in MODELS:
            model(config.model.name).check_layout(args, dims, config)
            _check_needs(config, dims)


def _check_numbers(config: JobConfig) -> None:
    for name, value in leaves(config):
        least, most = BETWEEN.get(name, (-math.inf, math.inf))
        if name in BETWEEN and value is not None and not least <= value <= most:  # nan is not either
            limit = f"from {least} to {most}" if most < math.inf else f"at least {least}"
            raise ValueError(f"{name} is {value}, expected {limit}")
    if config.checkpoint.keep_latest_k == 1:
        raise ValueError("checkpoint.keep_latest_k is 1, expected 0 for all or at least 2: one may be half-written")
    if (
        config.checkpoint.enable
        and config.checkpoint.async_mode == "async_with_pinned_mem"
        and default_device() == HOST
    ):
        raise ValueError("checkpoint.async_mode async_with_pinned_mem needs an accelerator; use async")


def _import(name: str) -> None:
    """Import the module that a job names, which may register more models and converters."""
    try:
        if name:
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"experimental.custom_import is {name!r}: {error}") from error


def _spec(name: str) -> specs.TrainSpec:
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    known = {*specs._extra_train_specs, *_supported_models, *_supported_experiments}
    _one_of("model.name", name, dict.fromkeys(sorted(known)))
    return specs.get_train_spec(name)


def _one_of(option: str, value: str, known: Mapping[str, Any]) -> Any:
    """Return known[value]; raises ValueError with the known values when the option has another one."""
    if value not in known:
        raise ValueError(f"{option} is {value!r}, expected one of {', '.join(known)}")
    return known[value]


def parallel_dims(config: JobConfig, num_ranks: int) -> ParallelDims:
    """Return TorchTitan's ParallelDims; raises ValueError when the degrees do not fit the number of ranks."""
    try:
        degrees = {name: getattr(config.parallelism, option) for name, option in DEGREES.items()}
        dims = ParallelDims(**degrees, world_size=num_ranks)
    except AssertionError as error:
        raise ValueError(
            f"the degrees of [parallelism] do not fit {num_ranks} ranks (--ranks N times machines): {_degrees(config)}"
            f"{f' ({error})' if str(error) else ''}. Their product must be the number of ranks; "
            "data_parallel_shard_degree -1 takes the remaining ranks"
        ) from error
    stage_ranks = dims.dp_shard * dims.cp * dims.tp
    if dims.ep > 1 and stage_ranks % (dims.ep * dims.etp):
        raise ValueError(
            f"expert_parallel_degree {dims.ep} times expert_tensor_parallel_degree {dims.etp} must divide the "
            f"{stage_ranks} ranks of a pipeline stage and a replica; the degrees are {_degrees(config)}"
        )
    return dims


def _degrees(config: JobConfig) -> str:
    options = dataclasses.asdict(config.parallelism)
    return ", ".join(f"{name} {value}" for name, value in options.items() if name.endswith("_degree"))


def _check_batch(config: JobConfig, dims: ParallelDims) -> None:
    training, replicas = config.training, dims.dp_replicate * dims.dp_shard
    micro_batch, global_batch = training.local_batch_size * replicas, training.global_batch_size
    if micro_batch < 1 or (global_batch >= 0 and (global_batch == 0 or global_batch % micro_batch)):
        raise ValueError(
            f"training.global_batch_size is {global_batch}, expected a multiple of {micro_batch}: local_batch_size "
            f"{training.local_batch_size} times {replicas} data-parallel ranks; -1 is that product itself"
        )


def _check_schedule(config: JobConfig, dims: ParallelDims) -> None:
    name = config.parallelism.pipeline_parallel_schedule
    if dims.pp_enabled and not config.parallelism.pipeline_parallel_schedule_csv:
        try:
            get_schedule_class(name)
        except ValueError as error:
            raise ValueError(f"parallelism.pipeline_parallel_schedule is {name!r}: {error}") from error


# ---- options without an effect


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of each option, as `section.name` or `section.subsection.name`, and its value."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def changed(config: JobConfig) -> dict[str, Any]:
    """Return the options whose values are not the defaults."""
    default = dict(leaves(type(config)()))
    return {name: value for name, value in leaves(config) if value != default[name]}


def _is_inside(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")


def _check_ignored(config: JobConfig) -> None:
    options = changed(config)
    for ignored in IGNORED:
        if ignored.only_ours and config.model.name not in MODELS:
            continue
        _refuse((name for name in options if _is_inside(name, ignored.name)), ignored.why)
    for name in options:
        converter = name.rpartition(".")[0]
        if name.startswith(QUANTIZE) and converter not in config.model.converters:
            _refuse([name], f"it is for the converter {converter}, which is not in model.converters")


def _check_needs(config: JobConfig, dims: ParallelDims) -> None:
    """Raise ValueError for options of our models that need, or contradict, other options."""
    if config.optimizer.early_step_in_backward and getattr(config.optimizer, "watch", False):
        raise ValueError(
            "optimizer.early_step_in_backward updates weights before gradients are clipped, and optimizer.watch "
            "checks gradients before an update; add --optimizer.no_watch, or omit early_step_in_backward"
        )
    if config.parallelism.enable_async_tensor_parallel and not dims.tp_enabled:
        _refuse(["parallelism.enable_async_tensor_parallel"], "tensor_parallel_degree is 1")
    if config.training.enable_cpu_offload and not dims.fsdp_enabled:
        _refuse(["training.enable_cpu_offload"], "FSDP does the offload, and this job does not use FSDP")


def _refuse(names: Iterable[str], why: str) -> None:
    """Raise ValueError for the first of the options, if there is one."""
    for name in names:
        raise ValueError(f"{name} would have no effect: {why}. Remove the option")
