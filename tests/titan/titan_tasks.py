"""What tests do inside a rank of titan_job, beside plain training."""

import dataclasses
import hashlib
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from titan_job import build, digest

from whorl.titan import worker
from whorl.titan.folder_lock import FILE

Tell = Callable[[tuple[Any, ...]], None]


def full(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def optimizer_state(trainer: Any) -> dict[str, Any]:
    """Of tensors what they hold, as a number."""
    return {
        name: hashlib.sha256(full(value).detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in trainer.optimizers.state_dict().items()
    }


def loaded(flags: list[str], tell: Tell) -> dict[str, Any]:
    """What a job has after loading and before its first step."""
    trainer = build(flags, tell)
    assert trainer.checkpointer.load(trainer.job_config.checkpoint.load_step)
    return {
        "weights": digest(trainer),
        "optimizer": optimizer_state(trainer),
        "step": trainer.step,
        "lr": trainer.lr_schedulers.schedulers[0].get_last_lr()[0],
        "seen": trainer.dataloader.seen,
    }


def refusals(flags: list[str], tell: Tell) -> dict[str, str]:
    """For each folder beside the job's own: what loading it says. None is loaded, so one job does for all."""
    trainer = build(flags, tell)
    answers = {}
    for folder in sorted(Path(trainer.checkpointer.folder).parent.glob("case_*")):
        trainer.checkpointer.folder = str(folder)
        trainer.checkpointer._bad_steps.clear()  # of the last folder
        before = digest(trainer)
        try:
            answers[folder.name] = f"loaded step {trainer.step}" if trainer.checkpointer.load() else "nothing to load"
            if trainer.step:
                answers[folder.name] = f"loaded step {trainer.step}"
                trainer.step = 0
        except Exception as e:
            answers[folder.name] = f"{type(e).__name__}: {e}"
            assert digest(trainer) == before, "a refused checkpoint changed the weights"
    return answers


def copy_checkpoint(source: Path, case: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(source / f"step-{step}", case / f"step-{step}")
    return case


def folder_rules(flags: list[str], tell: Tell) -> dict[str, Any]:
    """What becomes of a folder with steps 2 and 4 whole and 6 half written."""
    from whorl.titan import checkpoint

    trainer = build(flags, tell)
    checkpoints, folders = trainer.checkpointer, {}
    folder = Path(checkpoints.folder)

    def names() -> list[str]:
        checkpoints.close()  # waits for what is being removed
        return sorted(p.name for p in folder.iterdir() if p.name != FILE)

    (folder / "step-8").mkdir()  # under way
    checkpoints._writing = str(folder / "step-8")
    checkpoints._purge_stale_checkpoints()
    folders["purged"] = names()

    seen: list[list[str]] = []
    write = checkpoint.write_states

    def watched(*args: Any) -> Any:
        seen.append(sorted(p.name for p in folder.glob("step-4/*")))
        return write(*args)

    checkpoint.write_states = watched
    checkpoints.keep_latest_k = 0
    checkpoints.save(4)
    folders["left_when_written_again"] = [*seen]
    folders["written"] = sorted(p.name for p in (folder / "step-4").iterdir())

    checkpoints.last_save_model_only = True
    checkpoints.save(10, last_step=True)
    try:
        checkpoints.load()
    except ValueError as e:
        folders["model_alone"] = str(e)
    return folders


def with_torchtitans_metrics(flags: list[str], tell: Tell) -> None:
    from torchtitan.protocols import train_spec as specs

    ours = specs._extra_train_specs["deepseek_v32"]
    specs._extra_train_specs["deepseek_v32"] = dataclasses.replace(ours, build_metrics_processor_fn=None)
    build(flags, tell).train()


def without_space(flags: list[str], tell: Tell) -> str | None:
    """The reason that the log of a rank ends with when the disk is full: no file may have more than 100 kB."""
    trainer = build(flags, tell)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        trainer.train()
    except BaseException as error:
        return worker.reason_of(error)
    return None


def first_weights(flags: list[str], tell: Tell) -> bool:
    """A job that was to start from other weights and was killed in its first save starts from them again."""
    trainer = build(flags, tell)
    source = Path(trainer.checkpointer.initial_load_path)
    before = digest(trainer)
    assert trainer.checkpointer.load()
    started = digest(trainer)
    trainer.checkpointer.folder = str(source.parent)
    trainer.checkpointer.load(4)
    return before != started == digest(trainer) and trainer.step == 4


# ---- what is not finite


def poisoned_plain(flags: list[str], tell: Tell) -> str:
    return poisoned(flags, tell, plain=True)


def poisoned(flags: list[str], tell: Tell, *, plain: bool = False) -> str:
    """Train until a module's output, or what goes back to it, becomes NaN; last flag: `name direction rank step`."""
    *flags, where = flags
    name, direction, rank, step = where.split()
    trainer = build(flags, tell, plain=plain)
    modules = [part.get_submodule(name) for part in trainer.model_parts if name in dict(part.named_modules())]

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if trainer.step < int(step) or torch.distributed.get_rank() != int(rank):
            return None
        if direction == "forward":
            return output * torch.where(torch.arange(output.shape[-1]) == 3, torch.nan, 1.0)
        if output.requires_grad:
            output.register_hook(lambda grad: grad * torch.nan)
        return None

    for module in modules:
        if direction == "overflow":
            module.weight.data.sign_().mul_(2e38)
        else:
            module.register_forward_hook(spoil)
    state = {"weights": digest(trainer)}
    train_step = trainer.train_step

    def told(batches: Any) -> None:
        state["weights"] = digest(trainer)
        train_step(batches)

    trainer.train_step = told
    try:
        trainer.train()
    except Exception as e:
        untouched = digest(trainer) == state["weights"]
        return f"{type(e).__name__}: {e} | weights {'as before' if untouched else 'changed'}"
    return "went through"


def spoiled_weights(flags: list[str], tell: Tell) -> str:
    """A weight becomes NaN by no fault of the gradients."""
    trainer = build(flags, tell)
    trainer.model_parts[0].layers["1"].ffn_norm.weight.data[0] = torch.nan
    try:
        trainer.checkpointer.save(2)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "saved"


def spoiled_checkpoint(flags: list[str], tell: Tell) -> None:
    """Steps 2 and 4, the last with a NaN where the last flag says, as TorchTitan's own trainer writes it."""
    *flags, where = flags
    trainer = build(flags, tell)
    trainer.train()
    (model,), checkpoints = trainer.model_parts, trainer.checkpointer
    weight = model.layers["1"].ffn_norm.weight
    if where == "weights":
        weight.data[0] = torch.nan
    else:
        trainer.optimizers.optimizers[0].state[weight]["exp_avg_sq"][0] = torch.nan
    theirs = type(checkpoints).__mro__[1]
    theirs.save(checkpoints, 4)


# ---- stages


def switched_in_memory(flags: list[str], tell: Tell) -> str:
    """Four steps of warm-up, then four of sparse training in a new job that is handed everything by hand."""
    folder, *flags = flags
    four = (*flags, "--training.steps", "4")
    warmup = build([*four, "--job.dump_folder", f"{folder}/1", "--whorl.stage", "warmup"], tell)
    warmup.train()
    (first,) = warmup.model_parts
    moments = {
        name: {k: v.clone() for k, v in warmup.optimizers.optimizers[0].state[p].items()}
        for name, p in first.named_parameters()
        if p.requires_grad
    }
    torch.distributed.destroy_process_group()

    sparse = build([*four, "--job.dump_folder", f"{folder}/2", *SPARSE], tell)
    (second,) = sparse.model_parts
    second.load_state_dict({name: x.clone() for name, x in first.state_dict().items()})
    parameters = dict(second.named_parameters())
    for name, state in moments.items():
        sparse.optimizers.optimizers[0].state[parameters[name]] = state
    sparse.dataloader.seen, sparse.step = warmup.dataloader.seen, warmup.step
    sparse.job_config.training.steps = 8  # the schedule was made for the four that are left
    sparse.train()
    return digest(sparse)


SPARSE = ("--optimizer.lr", "2e-3")


def stage_state(flags: list[str], tell: Tell) -> dict[str, Any]:
    """Of a warm-up after a step: who has optimizer state, and whether the experts' biases moved."""
    trainer = build(flags, tell)
    trainer.train()
    (model,) = trainer.model_parts
    names = {p: name for name, p in model.named_parameters()}
    experts = [m for m in model.modules() if hasattr(m, "tokens_per_expert")]
    return {
        "with_state": sorted(names[p] for o in trainer.optimizers for p in o.state),
        "trained": sorted(name for p, name in names.items() if p.requires_grad),
        "biases": [float(m.expert_bias.abs().max()) for m in experts],
        "counts": [float(m.tokens_per_expert.sum()) for m in experts],
    }
