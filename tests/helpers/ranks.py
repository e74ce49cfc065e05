"""Worker processes with one gloo group between them, kept for many cases: starting Python is what takes the time."""

import atexit
import datetime
import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

LONGEST = 600
AFTER_AN_ERROR = 30  # seconds that the other ranks have to answer


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # No less than the longest that `run` waits: a rank may compile while another stands in a collective already.
    limit = datetime.timedelta(seconds=LONGEST)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        function, arguments = pipe.recv()
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                answer = function(*arguments)
            pipe.send(("ok", answer, [str(w.message) for w in caught]))
        except BaseException as e:
            pipe.send(("error", f"{type(e).__name__}: {e}", traceback.format_exc()))
        _end_groups()


def _end_groups() -> None:
    """End the groups that a case made: each has threads that wake a hundred times a second as long as it lives."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    for group in [group for group in world.pg_map if group is not world.default_pg]:
        dist.destroy_process_group(group)
    if "torch.distributed.tensor" in sys.modules:  # what DTensor remembers of a mesh names its groups
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
    gc.collect()


def _errors(answers: dict[int, tuple[Any, ...]]) -> str:
    return "".join(f"\nrank {rank}:\n{more}" for rank, (status, _, more) in answers.items() if status == "error")


class Ranks:
    """`run(function, ...)` calls a function on every rank and returns the answers in rank order."""

    def __init__(self, size: int) -> None:
        self.size, self.pipes, self.processes = size, [], []
        self.warnings: list[str] = []  # of rank 0 in the last run

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
        self.pipes, self.processes = [], []

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[tuple[Any, ...]]:
        """("ok", answer, warnings) or ("error", message, traceback) of every rank; a rank that hangs ends them all."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: dict[int, tuple[Any, ...]] = {}
        end = time.monotonic() + timeout
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {list(waiting.values())} gave no answer in {timeout} s{_errors(answers)}")
            answers |= {waiting[pipe]: pipe.recv() for pipe in ready}
            if _errors(answers):  # the others may stand in a collective that this rank will not join
                end = min(end, time.monotonic() + AFTER_AN_ERROR)
        return [answers[rank] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        answers = self.outcomes(function, *arguments, timeout=timeout)
        for rank, (status, _, more) in enumerate(answers):
            if status == "error":
                self.stop()  # the group may be out of step
                raise AssertionError(f"rank {rank}:\n{more}")
        self.warnings = answers[0][2]
        return [answer for _, answer, _ in answers]


_SHARED: dict[int, Ranks] = {}


def shared(size: int) -> Ranks:
    """The same workers for every test of this process: two, and one larger group at a time, since each takes memory."""
    if size not in _SHARED:
        _SHARED[size] = Ranks(size)
        atexit.register(_SHARED[size].stop)
    for other in _SHARED.values():
        if size > 2 and other.size not in (2, size):
            other.stop()
    return _SHARED[size]
