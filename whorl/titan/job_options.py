"""A job before it starts: what it names exists, its degrees fit its ranks, and nothing it asks for would be ignored.

`whorl train` looks before there are ranks, so that what was asked wrongly is said at once; every rank looks again, for
those who start TorchTitan themselves.
"""

import dataclasses
import importlib
import logging
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

from whorl.titan.register import MODELS, model, register

OPTIMIZERS = ("Adam", "AdamW")
DATA = "whorl.data, whorl.data_suffixes and whorl.tokenizer say what is read"
NO_TORCHFT = "TorchTitan 0.2.2 has TorchFT in a trainer of its own, torchtitan.experiments.ft.train, which this is not"
QUANTIZE = "quantize."  # so TorchTitan's converters to float8 and MX begin
# TorchTitan's dimensions, and the options of [parallelism] that say how many ranks each has.
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
    """An option, or a section with all that is in it, that nothing reads in this trainer."""

    name: str
    why: str
    only_ours: bool = False  # of our models; TorchTitan's own have their own loaders


IGNORED = [
    Ignored("fault_tolerance", NO_TORCHFT),
    Ignored("checkpoint.enable_ft_dataloader_checkpoints", NO_TORCHFT),
    Ignored("memory_estimation", "a program of TorchTitan's own reads it; whorl train --plan says what a layout needs"),
    Ignored("training.dataset", DATA, only_ours=True),
    Ignored("training.dataset_path", DATA, only_ours=True),
    Ignored("training.dataloader", f"text is in memory and needs no workers; {DATA}", only_ours=True),
    Ignored(
        "parallelism.context_parallel_rotate_method",
        "an indexer looks at all keys before it chooses: they are gathered, never rotated",
        only_ours=True,
    ),
    Ignored("validation", "this model has no validator in TorchTitan's sense", only_ours=True),
]


def read(arguments: Sequence[str]) -> JobConfig:
    """As a rank reads them. A misspelt option ends the process with 2, and says which are close."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # said again by every rank, in its log
    try:
        return ConfigManager().parse_args(list(arguments))
    except (AssertionError, AttributeError, ImportError, OSError, TypeError) as error:
        raise ValueError(f"the job cannot be read: {type(error).__name__}: {error}") from error
    finally:
        logging.disable(before)


def locked_folders(config: JobConfig) -> list[Path]:
    """What one run at a time writes into."""
    folder = Path(config.job.dump_folder)
    return [folder, folder / config.checkpoint.folder] if config.checkpoint.enable else [folder]


def ranks_here() -> int:
    """Of all machines, as a rank finds them."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Also where ranks were not started by torchrun, whose RANK nobody has then set."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def check(config: JobConfig, num_ranks: int | None) -> None:
    """num_ranks: of all machines; None where it is not known yet. A ValueError says what there is."""
    register()
    _import(config.experimental.custom_import)
    spec = _spec(config.model.name)
    args = _one_of("model.flavor", config.model.flavor, spec.model_args)
    for name in config.model.converters:
        _one_of("model.converters", name, model_converter._registry_model_converter_cls)
    _one_of("optimizer.name", config.optimizer.name, dict.fromkeys(OPTIMIZERS))
    _check_ignored(config)
    if config.comm.mode != "default":  # one process stands for all, as many as TorchTitan reads from there
        told = os.environ.get("NGPU", "")
        num_ranks = int(told) if told.isdigit() else None
    dims = None if num_ranks is None else parallel_dims(config, num_ranks)
    if dims is not None:
        _check_batch(config, dims)
        _check_schedule(config, dims)
        if config.model.name in MODELS:
            model(config.model.name).check_layout(args, dims, config)
            _check_needs(config, dims)


def _import(name: str) -> None:
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


def _one_of(option: str, asked: str, known: Mapping[str, Any]) -> Any:
    if asked not in known:
        raise ValueError(f"{option} is {asked!r}; there are {', '.join(known)}")
    return known[asked]


def parallel_dims(config: JobConfig, num_ranks: int) -> ParallelDims:
    """TorchTitan's, or a ValueError that says why the degrees do not fit."""
    try:
        found = {name: getattr(config.parallelism, option) for name, option in DEGREES.items()}
        dims = ParallelDims(**found, world_size=num_ranks)
    except AssertionError as error:
        raise ValueError(
            f"the degrees of [parallelism] do not fit {num_ranks} ranks (--ranks N times machines): {_degrees(config)}"
            f"{f' ({error})' if str(error) else ''}. Their product has to be the number of ranks; "
            "data_parallel_shard_degree -1 takes what is left"
        ) from error
    shared = dims.dp_shard * dims.cp * dims.tp
    if dims.ep > 1 and shared % (dims.ep * dims.etp):
        raise ValueError(
            f"expert_parallel_degree {dims.ep} times expert_tensor_parallel_degree {dims.etp} has to divide the "
            f"{shared} ranks of a pipeline stage and a replica; the degrees are {_degrees(config)}"
        )
    return dims


def _degrees(config: JobConfig) -> str:
    found = dataclasses.asdict(config.parallelism)
    return ", ".join(f"{name} {value}" for name, value in found.items() if name.endswith("_degree"))


def _check_batch(config: JobConfig, dims: ParallelDims) -> None:
    training, replicas = config.training, dims.dp_replicate * dims.dp_shard
    of_ranks, whole = training.local_batch_size * replicas, training.global_batch_size
    if of_ranks < 1 or (whole >= 0 and (whole == 0 or whole % of_ranks)):
        raise ValueError(
            f"training.global_batch_size is {whole}, expected a multiple of {of_ranks}: local_batch_size "
            f"{training.local_batch_size} times {replicas} data-parallel ranks; -1 is that product itself"
        )


def _check_schedule(config: JobConfig, dims: ParallelDims) -> None:
    name = config.parallelism.pipeline_parallel_schedule
    if dims.pp_enabled and not config.parallelism.pipeline_parallel_schedule_csv:
        try:
            get_schedule_class(name)
        except ValueError as error:
            raise ValueError(f"parallelism.pipeline_parallel_schedule is {name!r}: {error}") from error


# ---- what nothing would read


def leaves(settings: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """`section.name` and value of all options, sections within sections too."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{above}{field.name}.")
        else:
            yield f"{above}{field.name}", value


def changed(config: JobConfig) -> dict[str, Any]:
    """Options that are not as they are by default."""
    default = dict(leaves(type(config)()))
    return {name: value for name, value in leaves(config) if value != default[name]}


def _inside(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")


def _check_ignored(config: JobConfig) -> None:
    asked = changed(config)
    for ignored in IGNORED:
        if ignored.only_ours and config.model.name not in MODELS:
            continue
        _refuse((name for name in asked if _inside(name, ignored.name)), ignored.why)
    for name in asked:
        converter = name.rpartition(".")[0]
        if name.startswith(QUANTIZE) and converter not in config.model.converters:
            _refuse([name], f"it is for the converter {converter}, which model.converters does not name")


def _check_needs(config: JobConfig, dims: ParallelDims) -> None:
    """Options of our models' that have an effect together with others alone."""
    if config.optimizer.early_step_in_backward and getattr(config.optimizer, "watch", False):
        raise ValueError(
            "optimizer.early_step_in_backward updates weights before gradients are clipped or looked at, and "
            "optimizer.watch promises to look before: add --optimizer.no_watch, or leave it out"
        )
    if config.parallelism.enable_async_tensor_parallel and not dims.tp_enabled:
        _refuse(["parallelism.enable_async_tensor_parallel"], "tensor_parallel_degree is 1")
    if config.training.enable_cpu_offload and not dims.fsdp_enabled:
        _refuse(["training.enable_cpu_offload"], "FSDP does it, and no rank shares its weights with another")


def _refuse(names: Iterable[str], why: str) -> None:
    for name in names:
        raise ValueError(f"{name} would have no effect: {why}. Leave it out")
