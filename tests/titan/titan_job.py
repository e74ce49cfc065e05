"""TorchTitan jobs on CPU ranks, each process forked from one that has imported everything: importing takes seconds.

A rank tells what it does while it does it, so that a test can end it at any moment.
"""

import hashlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from folders import python_path

TIMEOUT = 120  # seconds without a word from a rank
FLAGS = [
    *("--job.custom_config_module", "whorl.titan.config", "--model.name", "deepseek_v32", "--model.flavor", "small"),
    *("--training.mixed_precision_param", "float32", "--training.seq_len", "24", "--training.local_batch_size", "2"),
    *("--training.max_norm", "1.0", "--lr_scheduler.warmup_steps", "2", "--optimizer.lr", "5e-3"),
    *("--activation_checkpoint.mode", "none", "--metrics.log_freq", "1000", "--debug.seed", "7"),
    *("--checkpoint.enable", "--checkpoint.no_last_save_model_only", "--whorl.data", "synthetic"),
]


@dataclass
class Told:
    """By one rank: losses by step (hexadecimal, all bits), and whatever else it said."""

    losses: dict[int, str] = field(default_factory=dict)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    answer: Any = None
    error: str | None = None


def _serve(function: Callable[..., Any], flags: list[str], rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        pipe.send(("answer", function(flags, pipe.send)))
    except BaseException as e:
        pipe.send(("error", f"{type(e).__name__}: {e}", traceback.format_exc()))
    os._exit(0)  # without waiting for what a killed job would not wait for either


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Job:
    """A job under way; `events()` are those of rank 0 as they come, `kill` ends all ranks at once."""

    def __init__(self, function: Callable[..., Any], flags: list[str], size: int = 1) -> None:
        os.environ["PYTHONPATH"] = python_path()  # the server that forks does not take over sys.path
        multiprocessing.forkserver.set_forkserver_preload(["titan_ready"])
        context = multiprocessing.get_context("forkserver")
        port, self.pipes, self.processes = _free_port(), [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(function, flags, rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.told = [Told() for _ in range(size)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)

    def events(self, rank: int = 0) -> Iterator[tuple[Any, ...]]:
        while True:
            if not self.pipes[rank].poll(TIMEOUT):
                self.kill()
                raise AssertionError(f"rank {rank} said nothing for {TIMEOUT} s")
            try:
                event = self.pipes[rank].recv()
            except EOFError:  # killed
                return
            told = self.told[rank]
            if event[0] == "loss":
                told.losses[event[1]] = event[2]
            elif event[0] == "answer":
                told.answer = event[1]
            elif event[0] == "error":
                told.error = event[1]
                told.events.append(event)
            else:
                told.events.append(event)
            yield event

    def finish(self) -> list[Told]:
        """All ranks to their end; an error of a rank is in what it told."""
        for rank in range(len(self.pipes)):
            for _ in self.events(rank):
                pass
        self.kill()
        return self.told


def run(flags: list[str], *, size: int = 1, function: Callable[..., Any] | None = None) -> list[Told]:
    told = Job(function or train, flags, size).finish()
    for rank, t in enumerate(told):
        assert t.error is None, f"rank {rank}:\n{t.events[-1][2]}"
    return told


def refusal(flags: list[str], *, size: int = 1, function: Callable[..., Any] | None = None) -> str:
    """The error of a job that is to fail, on every rank."""
    errors = {t.error for t in Job(function or train, flags, size).finish()}
    assert len(errors) == 1, errors
    error = errors.pop()
    assert error is not None, "the job went through"
    return error


# ---- in the ranks


def train(flags: list[str], tell: Callable[[tuple[Any, ...]], None]) -> str:
    """The digest of all weights at the end."""
    trainer = build(flags, tell)
    trainer.train()
    return digest(trainer)


def build(flags: list[str], tell: Callable[[tuple[Any, ...]], None], *, plain: bool = False) -> Any:
    """plain: with TorchTitan's own trainer."""
    from titan_ready import Telling
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    config = ConfigManager().parse_args([*FLAGS, *flags])
    return Trainer(config) if plain else Telling(config, tell)


def digest(trainer: Any) -> str:
    import torch.distributed.checkpoint.state_dict as states

    options = states.StateDictOptions(full_state_dict=True)
    sha = hashlib.sha256()
    for part in trainer.model_parts:
        for name, x in sorted(states.get_model_state_dict(part, options=options).items()):
            sha.update(name.encode())
            sha.update(x.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
