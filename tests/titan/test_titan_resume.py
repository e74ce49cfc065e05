"""TorchTitan's checkpoints with our optimizer and our trainer: exact resume, other ranks, and what is refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import titan_job
import titan_tasks
import torch
from titan_tasks import copy_checkpoint
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from whorl import digests
from whorl.titan.served_files import NAMES

STEPS = 6


def flags(folder: Path, *more: str, steps: int = STEPS) -> list[str]:
    return [
        *("--job.dump_folder", str(folder), "--training.steps", str(steps), "--checkpoint.interval", "2"),
        *more,
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, titan_job.Told]:
    """A job with TorchTitan's own AdamW, never interrupted; checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, titan_job.run(flags(folder))[0]


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, titan_job.Told]:
    """The same with moments on the host, saving in the background while the next steps swap."""
    folder = tmp_path_factory.mktemp("swapped")
    return folder, titan_job.run(flags(folder, "--optimizer.swap", "--checkpoint.async_mode", "async"))[0]


def contents(folder: Path, step: int) -> dict[str, Any]:
    """All of a checkpoint, read by torch alone; without our record, which names the settings."""
    path = folder / "checkpoint" / f"step-{step}"
    nested = _load_state_dict_from_keys(checkpoint_id=path)
    values: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}" if name else str(key), inner)
        else:
            values[name] = value

    walk("", nested)
    return {k: v for k, v in values.items() if not k.startswith("whorl.")}


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        same = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert same, name


def test_every_checkpoint_has_its_digests(plain: Any, swapped: Any) -> None:
    """Also one that was written in the background, and the last one."""
    from whorl.titan.checkpoint_files import check_digests

    for folder in (plain[0], swapped[0]):
        for step in (2, 4, 6):
            names = {path.name for path in (folder / f"checkpoint/step-{step}").iterdir()}
            assert {*digests.read(folder / f"checkpoint/step-{step}"), digests.FILE} == names
            check_digests(folder / f"checkpoint/step-{step}")


def test_the_swap_optimizer_is_adamw_in_torchtitan(plain: Any, swapped: Any) -> None:
    assert swapped[1].losses == plain[1].losses
    assert swapped[1].answer == plain[1].answer


def test_checkpoints_saved_while_swapping_are_the_ones_of_their_step(plain: Any, swapped: Any) -> None:
    """Also of step 2 and 4, that later steps must not have written into."""
    for step in (2, 4, 6):
        ours, theirs = contents(swapped[0], step), contents(plain[0], step)
        dropped = {name for name in theirs if name.startswith("optimizer.param_groups")}  # fused, foreach, ...
        assert_equal(*({k: v for k, v in of.items() if k not in dropped} for of in (ours, theirs)))


@pytest.mark.parametrize("kind", ["exact", pytest.param("int8", marks=pytest.mark.slow)])
def test_resume_is_exact(kind: str, swapped: Any, tmp_path: Path) -> None:
    more = ("--optimizer.swap", "--optimizer.moments", kind)
    folder, unbroken = swapped
    if kind != "exact":
        folder = tmp_path / "unbroken"
        unbroken = titan_job.run(flags(folder, *more))[0]
        assert unbroken.losses != swapped[1].losses
    copy_checkpoint(folder / "checkpoint", tmp_path / "checkpoint", 4)
    resumed = titan_job.run(flags(tmp_path, *more))[0]
    assert resumed.losses == {step: unbroken.losses[step] for step in (5, 6)}
    assert resumed.answer == unbroken.answer


@pytest.mark.slow
def test_adamw_goes_on_where_the_swap_optimizer_stopped(plain: Any, swapped: Any, tmp_path: Path) -> None:
    copy_checkpoint(swapped[0] / "checkpoint", tmp_path / "checkpoint", 2)
    resumed = titan_job.run(flags(tmp_path))[0]
    assert resumed.losses == {step: plain[1].losses[step] for step in (3, 4, 5, 6)}
    assert resumed.answer == plain[1].answer


# ---- other ranks


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["tensor_parallel_degree", "expert_parallel_degree", "pipeline_parallel_degree"])
def test_the_swap_optimizer_is_adamw_on_two_ranks(degree: str, tmp_path: Path) -> None:
    """Parameters sharded on one mesh or another, resumed in between."""
    layout = (f"--parallelism.{degree}", "2", "--parallelism.pipeline_parallel_schedule", "1F1B")
    theirs = titan_job.run(flags(tmp_path / "plain", *layout, steps=4), size=2)
    ours = titan_job.run(flags(tmp_path / "swap", *layout, "--optimizer.swap", steps=4), size=2)
    assert [t.losses for t in ours] == [t.losses for t in theirs]
    copy_checkpoint(tmp_path / "swap" / "checkpoint", tmp_path / "again" / "checkpoint", 2)
    resumed = titan_job.run(flags(tmp_path / "again", *layout, "--optimizer.swap", steps=4), size=2)
    for mine, whole in zip(resumed, theirs, strict=True):
        assert mine.losses == {step: whole.losses[step] for step in (3, 4)}
        assert mine.answer == whole.answer


@pytest.mark.slow
def test_one_rank_to_two_and_back(swapped: Any, tmp_path: Path) -> None:
    """Same weights, moments and place in the data, to the bit; one step on two ranks, and one rank takes it over."""
    copy_checkpoint(swapped[0] / "checkpoint", tmp_path / "checkpoint", 4)
    two = ("--optimizer.swap", "--training.local_batch_size", "1")
    one_rank = titan_job.run(flags(tmp_path, "--optimizer.swap"), function=titan_tasks.loaded)[0].answer
    for told in titan_job.run(flags(tmp_path, *two), size=2, function=titan_tasks.loaded):
        assert_same_state(told.answer, one_rank)
    ranks = titan_job.run(flags(tmp_path, *two), size=2)
    for step in (5, 6):  # another order of sums, so not the same bits
        total = sum(float.fromhex(told.losses[step]) for told in ranks)
        assert total == pytest.approx(float.fromhex(swapped[1].losses[step]), rel=1e-5)
    back = titan_job.run(flags(tmp_path, "--optimizer.swap"), function=titan_tasks.loaded)[0].answer
    assert back["step"] == 6
    assert back["weights"] == ranks[0].answer


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert_equal(a["optimizer"], b["optimizer"])
    assert {k: v for k, v in a.items() if k != "optimizer"} == {k: v for k, v in b.items() if k != "optimizer"}


# ---- what is refused


def damage(path: Path, *, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def flip(path: Path) -> None:
    """One bit in the middle of a file, where a tensor's data are."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_refusals(plain: Any, tmp_path: Path) -> None:
    source = plain[0] / "checkpoint"

    def case(name: str, *steps: int) -> Path:
        return copy_checkpoint(source, tmp_path / f"case_{name}", *steps) / f"step-{max(steps)}"

    damage(case("cut", 2, 4) / "__0_0.distcp", keep=10_000)
    damage(case("cut_metadata", 4) / ".metadata", keep=500)
    (case("lost", 4) / "__0_0.distcp").unlink()
    (case("unfinished", 2, 4) / ".metadata").unlink()
    (case("only_unfinished", 4) / ".metadata").unlink()
    flip(case("flipped", 2, 4) / "__0_0.distcp")
    (case("old", 4) / "SHA256SUMS").unlink()
    (case("pickle", 4) / ".metadata").write_bytes(pickle.dumps({"not": "ours"}))
    foreign = tmp_path / "case_foreign" / "step-4"
    foreign.mkdir(parents=True)
    torch.save({"weight": torch.zeros(3)}, foreign / "model.pt")
    exported = tmp_path / "case_export" / "step-4"
    exported.mkdir(parents=True)
    (exported / "model.safetensors.index.json").write_text("{}")

    said = titan_job.run(flags(tmp_path), function=titan_tasks.refusals)[0].answer
    expected = {
        "cut": ("BadCheckpoint", "step-4: __0_0.distcp has 10000 bytes, expected", "whorl.fall_back", "from step-2"),
        "cut_metadata": (
            "BadCheckpoint",
            "step-4: its .metadata cannot be read",
            "remove the folder to start from scratch",
        ),
        "lost": ("BadCheckpoint", "step-4: __0_0.distcp is missing"),
        "pickle": ("BadCheckpoint", "its .metadata cannot be read"),
        "foreign": ("BadCheckpoint", "it is not a TorchTitan checkpoint: it has model.pt"),
        "export": ("BadCheckpoint", "Hugging Face export"),
        "flipped": ("BadCheckpoint", "step-4: __0_0.distcp is not as it was written", "whorl.fall_back", "from step-2"),
        "old": ("loaded step 4",),
        "unfinished": ("loaded step 2",),
        "only_unfinished": ("nothing to load",),
    }
    assert said.keys() == {f"case_{name}" for name in expected}
    for name, words in expected.items():
        for word in words:
            assert word in said[f"case_{name}"], said[f"case_{name}"]


def test_falling_back_is_asked_for(plain: Any, tmp_path: Path) -> None:
    folder = copy_checkpoint(plain[0] / "checkpoint", tmp_path / "checkpoint", 2, 4)
    flip(folder / "step-4" / "__0_0.distcp")
    resumed = titan_job.run(flags(tmp_path, "--whorl.fall_back"))[0]
    assert resumed.losses == {step: plain[1].losses[step] for step in (3, 4, 5, 6)}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk(mode: str, plain: Any, tmp_path: Path) -> None:
    job = flags(tmp_path, "--checkpoint.async_mode", mode)
    reason = titan_job.run(job, function=titan_tasks.without_space)[0].answer
    folder = tmp_path / "checkpoint" / "step-2"
    assert reason == f"{folder}/__0_0.distcp: cannot be written: File too large"
    assert not any((folder / name).exists() for name in (".metadata", "__0_0.distcp"))
    assert titan_job.run(job)[0].losses == plain[1].losses, "it starts from the first step again"


def test_initial_weights_that_were_changed(plain: Any, tmp_path: Path) -> None:
    source = copy_checkpoint(plain[0] / "checkpoint", tmp_path / "source", 4) / "step-4"
    flip(source / "__0_0.distcp")
    job = flags(tmp_path, "--checkpoint.initial_load_path", str(source), "--whorl.fall_back")
    said = titan_job.refusal(job)
    assert f"checkpoint.initial_load_path {source}: __0_0.distcp is not as it was written" in said


def test_a_checkpoint_of_another_model(plain: Any, tmp_path: Path) -> None:
    copy_checkpoint(plain[0] / "checkpoint", tmp_path / "checkpoint", 4)
    deeper = titan_job.refusal(flags(tmp_path, "--model.flavor", "deeper"))
    assert "step-4: it belongs to another model: it lacks layers.2." in deeper
    other = flags(tmp_path, "--model.flavor", "fewer_keys")  # the same tensors
    assert "index_topk is 16 in the checkpoint and 8 in this run" in titan_job.refusal(other)
    assert min(titan_job.run([*other, "--whorl.accept_changes"])[0].losses) == 5


def test_a_larger_models_checkpoint_is_not_loaded_in_part(tmp_path: Path) -> None:
    """torch.distributed.checkpoint itself would take the layers that it finds."""
    titan_job.run(flags(tmp_path, "--model.flavor", "deeper", steps=2))
    assert "it has layers.2." in titan_job.refusal(flags(tmp_path))


def test_the_folder_of_a_run(plain: Any, tmp_path: Path) -> None:
    copy_checkpoint(plain[0] / "checkpoint", tmp_path / "checkpoint", 2, 4, 6)
    (tmp_path / "checkpoint" / "step-6" / ".metadata").unlink()
    job = flags(tmp_path, "--checkpoint.keep_latest_k", "2")
    answer = titan_job.run(job, function=titan_tasks.folder_rules)[0].answer
    assert answer["purged"] == ["step-4", "step-8"], "the one that can be loaded stays beside the one under way"
    (left,) = answer["left_when_written_again"]
    assert set(left) <= NAMES, "old metadata would call a mixture of files whole"
    assert set(answer["written"]) - NAMES == {".metadata", "__0_0.distcp", "SHA256SUMS"}
    assert "step-10: it has only the model" in answer["model_alone"]


def test_initial_weights_survive_a_kill_in_the_first_save(plain: Any, tmp_path: Path) -> None:
    half = copy_checkpoint(plain[0] / "checkpoint", tmp_path / "checkpoint", 2) / "step-2"
    (half / ".metadata").unlink()
    source = str(plain[0] / "checkpoint" / "step-4")
    job = flags(tmp_path, "--checkpoint.initial_load_path", source)
    assert titan_job.run(job, function=titan_tasks.first_weights)[0].answer


# ---- from warm-up to sparse training


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, titan_job.Told]:
    folder = tmp_path_factory.mktemp("warm")
    return folder, titan_job.run(flags(folder, "--whorl.stage", "warmup", "--optimizer.swap", steps=4))[0]


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> titan_job.Told:
    """Both stages without a checkpoint between them."""
    folder = str(tmp_path_factory.mktemp("by_hand"))
    return titan_job.run([folder, "--checkpoint.interval", "100"], function=titan_tasks.switched_in_memory)[0]


def test_warm_up_saves_the_indexers_moments_alone(warm: Any) -> None:
    early, late = contents(warm[0], 2), contents(warm[0], 4)
    learned = {
        name for name in late if isinstance(late[name], torch.Tensor) and not torch.equal(early[name], late[name])
    }
    weights = {name for name in learned if not name.startswith("optimizer.")}
    assert weights
    assert all(".indexer." in name for name in learned), learned
    assert {name for name in late if name.startswith("optimizer.state.") and ".indexer." not in name} == set()


@pytest.mark.parametrize("swap", [True, False])
def test_sparse_training_goes_on_from_warm_up(swap: bool, warm: Any, by_hand: titan_job.Told, tmp_path: Path) -> None:
    more = ("--optimizer.swap",) if swap else ()
    assert warm[1].losses == {step: by_hand.losses[step] for step in (1, 2, 3, 4)}
    copy_checkpoint(warm[0] / "checkpoint", tmp_path / "checkpoint", 4)
    sparse = titan_job.run(flags(tmp_path, *more, *titan_tasks.SPARSE, steps=8))[0]
    assert sparse.losses == {step: by_hand.losses[step] for step in (5, 6, 7, 8)}
    assert sparse.answer == by_hand.answer
    if not swap:
        return
    # Interrupted within the stage: it resumes there, on the same schedule.
    copy_checkpoint(tmp_path / "checkpoint", tmp_path / "again" / "checkpoint", 4, 6)
    again = titan_job.run(flags(tmp_path / "again", *more, *titan_tasks.SPARSE, steps=8))[0]
    assert again.losses == {step: by_hand.losses[step] for step in (7, 8)}
    assert again.answer == by_hand.answer


def test_no_way_back_to_warm_up(plain: Any, tmp_path: Path) -> None:
    copy_checkpoint(plain[0] / "checkpoint", tmp_path / "checkpoint", 4)
    said = titan_job.refusal(flags(tmp_path, "--whorl.stage", "warmup"))
    assert "its stage is sparse and whorl.stage is warmup" in said


def test_frozen_parameters_have_no_state_and_experts_keep_their_biases(tmp_path: Path) -> None:
    frozen, trained = (
        titan_job.run(flags(tmp_path / name, *more, steps=2), function=titan_tasks.stage_state)[0].answer
        for name, more in (("warm", ("--whorl.stage", "warmup")), ("sparse", ("--model.flavor", "with_mtp")))
    )
    assert frozen["with_state"] == frozen["trained"] != []
    assert all(".indexer." in name for name in frozen["with_state"])
    assert trained["with_state"] == trained["trained"]
    assert len(frozen["biases"]) == 1
    assert len(trained["biases"]) == 2, "with the one of multi-token prediction, which TorchTitan's hook passes by"
    assert max(frozen["biases"]) == 0 < min(trained["biases"])
    assert max(frozen["counts"]) == max(trained["counts"]) == 0


# ---- one checkpoint on disk, without a job


def model_alone(folder: Path) -> Path:
    from torch.distributed import checkpoint

    checkpoint.save({"weight": torch.zeros(4)}, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_a_file_with_more_than_was_written_is_refused(tmp_path: Path) -> None:
    from whorl.titan.checkpoint_files import BadCheckpoint, read_complete

    folder = model_alone(tmp_path / "step-2")
    assert read_complete(folder).state_dict_metadata.keys() == {"weight"}
    (file,) = folder.glob("*.distcp")
    with file.open("ab") as data:
        data.write(b"\0")
    with pytest.raises(BadCheckpoint, match=rf"{file.name} has \d+ bytes, expected \d+"):
        read_complete(folder)


def test_only_the_checkpoint_of_step_0_may_hold_the_model_alone(tmp_path: Path) -> None:
    """It is the one that training starts from; it has no optimizer and no place in the data."""
    from whorl.titan.checkpoint import Checkpoints

    manager = object.__new__(Checkpoints)
    manager.folder, manager._bad_steps = str(tmp_path), {}
    for step in (0, 2):
        model_alone(tmp_path / f"step-{step}")
    assert manager._problem(0) is None
    assert str(manager._problem(2)).startswith("it has only the model")
