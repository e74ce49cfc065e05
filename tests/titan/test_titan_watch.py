"""NaN stops training before the update, and the layer that made it is named."""

import math
from pathlib import Path
from typing import Any

import pytest
import titan_job
import titan_tasks
import torch
from torch import nn


def poisoned(folder: Path, where: str, *more: str, size: int = 1, plain: bool = False) -> list[str]:
    flags = ["--job.dump_folder", str(folder), "--training.steps", "4", *more, where]
    task = titan_tasks.poisoned_plain if plain else titan_tasks.poisoned
    return [told.answer for told in titan_job.run(flags, size=size, function=task)]


@pytest.mark.slow
def test_a_layers_output(tmp_path: Path) -> None:
    (said,) = poisoned(tmp_path, "layers.1.attention.wkv_a forward 0 3", "--checkpoint.interval", "2")
    assert "NotFinite: step 3: the loss is not finite" in said
    assert f"Nothing was updated in this step; the last good checkpoint is {tmp_path}/checkpoint/step-2" in said
    assert "the output of layers.1.attention.wkv_a is the first that is not finite, from finite inputs" in said
    assert said.endswith("weights as before")


def test_a_gradient(tmp_path: Path) -> None:
    """The loss is finite. Backward meets wo's own gradient first, as what goes back to its output is spoilt."""
    (said,) = poisoned(tmp_path, "layers.1.attention.wo backward 0 2", "--optimizer.swap")
    assert "step 2: the gradient is not finite" in said
    assert "this run has no complete checkpoint in" in said
    assert "the gradient of layers.1.attention.wo is the first that is not, after layers.1." in said
    assert said.endswith("weights as before")


@pytest.mark.slow
def test_one_of_two_ranks(tmp_path: Path) -> None:
    answers = poisoned(tmp_path, "layers.1.attention.wo forward 1 2", "--training.local_batch_size", "1", size=2)
    for said in answers:
        assert "Rank 1: the output of layers.1.attention.wo is the first that is not finite, from finite inputs" in said
        assert said.endswith("weights as before")


def test_a_pipeline_stage(tmp_path: Path) -> None:
    pipeline = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B")
    for said in poisoned(tmp_path, "layers.1.attention.wo forward 1 2", *pipeline, size=2):
        assert "Rank 1: the output of layers.1.attention.wo is the first that is not finite, from finite inputs" in said
        assert said.endswith("weights as before")


@pytest.mark.slow
def test_a_compiled_block_is_looked_into(tmp_path: Path) -> None:
    compiled = ("--compile.enable", "--compile.backend", "eager")
    (said,) = poisoned(tmp_path, "layers.1.attention.wkv_a overflow 0 1", *compiled)
    assert "the output of layers.1.attention.wkv_a is the first that is not finite, from finite inputs" in said


def test_torchtitans_own_trainer(tmp_path: Path) -> None:
    (said,) = poisoned(tmp_path / "a", "layers.1.attention.wkv_a forward 0 2", plain=True)
    assert "the output of layers.1.attention.wkv_a is the first that is not finite, from finite inputs" in said
    assert said.endswith("weights as before")
    (said,) = poisoned(tmp_path / "b", "layers.1.attention.wo backward 0 2", plain=True)
    assert "it appears in backward, where only WhorlTrainer (`whorl train`) can find the layer" in said


def test_without_the_watch_it_goes_on(tmp_path: Path) -> None:
    """So the tests above see the watch at work, and the checkpoint of NaN weights is refused nevertheless."""
    (said,) = poisoned(tmp_path, "layers.1.attention.wkv_a forward 0 3", "--optimizer.no-watch")
    assert "NotFinite: step 4: weights of" in said
    assert "no checkpoint was written" in said
    assert said.endswith("weights changed")


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    flags = ["--job.dump_folder", str(tmp_path), "--checkpoint.interval", "2"]
    (told,) = titan_job.run(flags, function=titan_tasks.spoiled_weights)
    assert told.answer == ("NotFinite: step 2: weights of layers.1.ffn_norm are not finite; no checkpoint was written")
    assert not (tmp_path / "checkpoint" / "step-2").exists()


@pytest.mark.parametrize(
    ("where", "swap"),
    [
        pytest.param("weights", (), marks=pytest.mark.slow),
        pytest.param("moments", ("--optimizer.swap",), marks=pytest.mark.slow),
        pytest.param("moments", (), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from(where: str, swap: tuple[str, ...], tmp_path: Path) -> None:
    """Nor called sound: training from it would stop at once, or make every weight NaN with its first update."""
    flags = ["--job.dump_folder", str(tmp_path), "--checkpoint.interval", "2", *swap]
    titan_job.run([*flags, "--training.steps", "2", where], function=titan_tasks.spoiled_checkpoint)
    said = titan_job.refusal([*flags, "--training.steps", "6"])
    assert f"step-4: {where} of layers.1.ffn_norm" in said
    assert "are not finite. Remove the folder, or set whorl.fall_back, to continue from step-2" in said
    message = titan_job.refusal([*flags, "--training.steps", "6", "--checkpoint.load_step", "4"])
    assert "checkpoint.load_step is 4, and" in message
    (told,) = titan_job.run([*flags, "--training.steps", "6", "--whorl.fall_back"])
    assert sorted(told.losses) == [3, 4, 5, 6]
    (again,) = titan_job.run([*flags, "--training.steps", "8"])
    assert sorted(again.losses) == [7, 8], "step 4 was written anew, and 6 after it"


# ---- the watch alone, over two layers


def small() -> Any:
    from whorl.titan.nan_watch import NaNWatch

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    model.register_buffer("bias_of_experts", torch.zeros(3))
    return model, NaNWatch([model])


def test_buffers_are_looked_at_too() -> None:
    from whorl.titan.nan_watch import bad_weights

    model, _ = small()
    assert bad_weights([model]) == []
    model.bias_of_experts[1] = math.nan
    assert bad_weights([model]) == ["the model"]


def test_a_gradient_is_looked_at_when_another_is_gone() -> None:
    """A parameter that was frozen has no gradient any more: another one stands for all."""
    from whorl.titan.nan_watch import NotFinite

    model, watch = small()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    watch.check()
    watch._probe.grad = None
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)
    with pytest.raises(NotFinite, match="the gradient is not finite"):
        watch.check()


def test_batches_are_kept_for_one_step_of_training_alone() -> None:
    model, watch = small()
    model.register_forward_pre_hook(watch._record_inputs, with_kwargs=True)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert watch._batches == [], "validation is not run again"
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert len(watch._batches) == 2
    watch.check()
    assert watch._batches == []
