"""What a job asks for is there, fits its ranks and has an effect, or is refused before there are ranks."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from whorl.cli import app

pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")

import torchtitan

from whorl.device import HOST, default_device
from whorl.titan import job_options, train_command
from whorl.titan.config import Whorl

THEIRS = Path(torchtitan.__file__).parent
OURS = Path(__file__).parents[2] / "whorl" / "titan"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


TP2 = ("--ranks", "2", "--parallelism.tensor_parallel_degree", "2")


def test_every_number_has_a_bound_or_none_is_known() -> None:
    """An option that is not there would not be checked."""
    config = job_options.read(["--job.custom_config_module", train_command.CONFIG])
    assert job_options.BETWEEN.keys() <= dict(job_options.leaves(config)).keys()


@pytest.mark.skipif(default_device() != HOST, reason="for machines without an accelerator")
def test_pinned_memory_needs_an_accelerator() -> None:
    done = run("tiny", "--dry-run", "--checkpoint.async_mode", "async_with_pinned_mem")
    assert done.exit_code == 2
    assert "async_with_pinned_mem needs an accelerator; use async" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model.flavor", "huge"), ("model.flavor is 'huge', expected one of tiny, debug, 4l, 8l", "671b")),
        (("--model.name", "gpt"), ("model.name is 'gpt', expected one of", " deepseek_v3, deepseek_v32, flux")),
        (
            ("--model.converters", "whorl_rope,whorl_rop"),
            ("model.converters is 'whorl_rop', expected one of", "whorl_rope"),
        ),
        (("--model.converters", "float8"), ("model.converters is 'float8', expected one of", "quantize.linear.float8")),
        (("--optimizer.name", "Lion"), ("optimizer.name is 'Lion', expected one of Adam, AdamW",)),
        (
            ("--ranks", "2", "--parallelism.tensor_parallel_degree", "4"),
            (
                "do not fit 2 ranks",
                "tensor_parallel_degree 4",
                "data_parallel_shard_degree -1 takes the remaining ranks",
            ),
        ),
        (("--parallelism.context_parallel_degree", "0"), ("do not fit 1 ranks", "context_parallel_degree 0", ">= 1")),
        (
            ("--ranks", "2", "--parallelism.expert_parallel_degree", "4"),
            ("expert_parallel_degree 4 times expert_tensor_parallel_degree 1 must divide the 2 ranks",),
        ),
        (
            ("--ranks", "8", "--parallelism.tensor_parallel_degree", "8"),
            ("tensor_parallel_degree is 8, expected a divisor of the 4 heads",),
        ),
        (
            (
                "--ranks",
                "2",
                "--parallelism.pipeline_parallel_degree",
                "2",
                "--parallelism.pipeline_parallel_schedule=X",
            ),
            ("pipeline_parallel_schedule is 'X'", "1F1B"),
        ),
        (("--training.global_batch_size", "3"), ("training.global_batch_size is 3, expected a multiple of 8",)),
        (("--experimental.custom_import", "no.such"), ("experimental.custom_import is 'no.such': No module named",)),
        (("--job.custom_config_module", "no.such"), ("the job cannot be read: ModuleNotFoundError",)),
        (("--training.stepz", "3"), ("--training.steps",)),
        (("--training.steps", "many"), ("many",)),
        # Numbers that no run can be made of.
        (("--training.steps", "-1"), ("training.steps is -1, expected at least 1",)),
        (("--checkpoint.interval", "0"), ("checkpoint.interval is 0, expected at least 1",)),
        (("--training.seq_len", "0"), ("training.seq_len is 0, expected at least 1",)),
        (("--training.local_batch_size=-2",), ("training.local_batch_size is -2, expected at least 1",)),
        (("--metrics.log_freq", "0"), ("metrics.log_freq is 0, expected at least 1",)),
        (("--optimizer.lr=-1",), ("optimizer.lr is -1.0, expected at least 0",)),
        (("--optimizer.lr", "nan"), ("optimizer.lr is nan, expected at least 0",)),
        (("--optimizer.beta1", "1.5"), ("optimizer.beta1 is 1.5, expected from 0 to 1",)),
        (("--training.max_norm=-1",), ("training.max_norm is -1.0, expected at least 0",)),
        (("--checkpoint.load_step=-7",), ("checkpoint.load_step is -7, expected at least -1",)),
        (("--checkpoint.keep_latest_k", "1"), ("checkpoint.keep_latest_k is 1, expected 0 for all or at least 2",)),
        # What nothing would read.
        (("--fault_tolerance.enable",), ("fault_tolerance.enable would have no effect", "experiments.ft.train")),
        (("--fault_tolerance.group_size", "2"), ("fault_tolerance.group_size would have no effect",)),
        (("--memory_estimation.enable",), ("memory_estimation.enable would have no effect", "--plan")),
        (("--training.dataset", "c4"), ("training.dataset would have no effect", "whorl.data")),
        (("--training.dataloader.num_workers", "2"), ("training.dataloader.num_workers would have no effect",)),
        (("--validation.enable",), ("validation.enable would have no effect", "no TorchTitan validator")),
        (
            ("--parallelism.context_parallel_rotate_method", "alltoall"),
            ("context_parallel_rotate_method would have no effect", "gathered"),
        ),
        (
            ("--quantize.linear.float8.recipe_name", "rowwise"),
            ("quantize.linear.float8.recipe_name would have no effect", "which is not in model.converters"),
        ),
        (("--parallelism.enable_async_tensor_parallel",), ("enable_async_tensor_parallel would have no effect",)),
        (("--training.enable_cpu_offload",), ("training.enable_cpu_offload would have no effect",)),
        (("--optimizer.early_step_in_backward",), ("updates weights before gradients are clipped", "no_watch")),
        *(
            ((*TP2, "--model.converters", name), (f"{name} does not support tensor parallelism",))
            for name in ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8")
        ),
    ],
)
def test_bad_usage(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = run("tiny", "--dry-run", *options)
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.output.replace("\n", ""), done.output


def test_a_file_with_bad_settings(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\nflavour = "8B"\n')
    done = run(str(file), "--dry-run")
    assert done.exit_code == 2
    assert "flavour" in done.output
    file.write_text('[model]\nname = "llama3"\nflavor = "9B"\n')
    done = run(str(file), "--dry-run")
    assert done.exit_code == 2
    assert "model.flavor is '9B', expected one of debugmodel" in done.output


def test_what_has_an_effect_is_taken(tmp_path: Path) -> None:
    """Of TorchTitan's own models their loaders are; and degrees of ranks that are not known yet are not judged."""
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\n[training]\ndataset = "c4"\n[validation]\nenable = true\n')
    assert run(str(file), "--dry-run").exit_code == 0
    many = ("--parallelism.tensor_parallel_degree", "4")
    assert run("tiny", "--dry-run", "--ranks", "2", "--torchrun", "--nnodes=2", *many).exit_code == 0
    assert run("tiny", "--dry-run", "--ranks", "3", "--torchrun", "--nnodes 1:4", *many).exit_code == 0
    assert run("tiny", "--dry-run", "--optimizer.early_step_in_backward", "--optimizer.no_watch").exit_code == 0


@pytest.mark.parametrize(
    ("options", "number"),
    [([], 1), (["--nnodes=8"], 8), (["--nnodes", "8"], 8), (["--nnodes=2:2"], 2), (["--nnodes=1:4"], None)],
)
def test_how_many_machines(options: list[str], number: int | None) -> None:
    assert train_command.num_machines(options) == number


# ---- every option there is

# Read by TorchTitan's manager from the command line itself, before there is a configuration.
BEFORE = {"job.config_file", "job.custom_config_module"}
# What a job with our model runs through.
RUN = [
    *(THEIRS / "train.py", THEIRS / "config" / "manager.py", THEIRS / "config" / "job_config.py"),
    *(f for part in ("components", "distributed", "tools", "protocols") for f in (THEIRS / part).rglob("*.py")),
    *OURS.rglob("*.py"),
]
NOT_RUN = {"validate.py", "job_options.py"}


def attributes_read() -> set[str]:
    names: set[str] = set()
    for file in RUN:
        if file.name in NOT_RUN or "ft" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            # Ours say getattr(settings, "name") where a job may come without the section.
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS in file.parents:
                names.add(node.value)
    return names


def test_every_option_is_read_or_refused() -> None:
    config = job_options.read(["--job.custom_config_module", "whorl.titan.config", "--model.name", "deepseek_v32"])
    options = [name for name, _ in job_options.leaves(config)]
    assert {f"whorl.{f.name}" for f in dataclasses.fields(Whorl)} < set(options)
    assert len(options) > 140
    read = attributes_read()
    ignored = [name for name in options if name.split(".")[-1] not in read and name not in BEFORE]
    assert {"training.dataset", "fault_tolerance.group_size"} < set(ignored), "else this looks at too much"
    for name in ignored:
        assert any(name == i.name or name.startswith(f"{i.name}.") for i in job_options.IGNORED), name
