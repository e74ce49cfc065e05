"""Pools of worker processes (see `worker`); clients take turns, see `fair_slots`.

A job that exceeds its time or memory is killed with its process, and the next job starts a new process. So is one whose
client left. So every worker is free again after a bounded time, and shutting down waits for none.
"""

import os
import signal
from collections.abc import Callable
from typing import IO, Any, TypeVar

from whorl.engine.heap import give_back
from whorl.sandbox import START_SECONDS, Ending, Sandbox, close_all, read, write

from .api_error import ApiError
from .engine_thread import EngineError
from .fair_slots import FairSlots
from .worker import OVER_MEMORY

_T = TypeVar("_T")
_SIZE = 3  # one client may have all but one of them
_CODES = {"length": "context_length_exceeded", "memory": "too_costly"}
_PARAMS = {"template": "messages"}


class Interrupted(Exception):
    """A job was ended because its client left; nobody is told."""


class Worker(Sandbox):
    """One worker process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        super().__init__("whorl.serve.worker", environment, setup, start_seconds=START_SECONDS)

    def greet(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().greet(stdin, stdout)
        give_back()  # the setup as JSON is several times a vocabulary

    def ask(self, name: str, **arguments: Any) -> Any:
        """Run a job of `worker.Jobs` and return its value; raise ApiError when it is refused or had to be killed, and
        Interrupted after `interrupt`."""

        def exchange(stdin: IO[bytes], stdout: IO[bytes]) -> Any:
            write(stdin, (name, arguments))
            return read(stdout)

        result = self.run(exchange)
        if "value" in result:
            return result["value"]
        if "failed" in result:  # for example by a panic of a Rust library
            raise ApiError(400, f"the request cannot be prepared: {result['failed']}", code="preparation_failed")
        kind = result["kind"]
        raise ApiError(400, result["refused"], code=_CODES.get(kind), param=_PARAMS.get(kind))

    def failure(self, ending: Ending, code: int) -> Exception:
        if ending == "interrupted":
            return Interrupted()
        if ending == "closed":
            return EngineError("the server is shutting down")
        if ending == "late":
            return ApiError(400, f"it takes longer than {self._setup['seconds']:g} seconds", code="too_costly")
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ApiError(400, f"{OVER_MEMORY}, or it crashed ({cause})", code="too_costly")


class WorkerPool:
    """Runs jobs on worker processes.

    kind: names the pool in thread names and messages. setup: sent to each worker: the tokenizer's state, and the
    seconds of CPU time and bytes of memory that a job may use. max_queue: how many jobs may wait.
    """

    def __init__(self, kind: str, setup: dict[str, Any], *, max_queue: int) -> None:
        self.workers = [Worker(setup) for _ in range(_SIZE)]
        self._slots = FairSlots(kind, self.workers, max_queue=max_queue)

    async def start(self) -> None:
        """Start one process; the others start when several jobs come at once."""
        await self.run(lambda worker: worker.ask("decode", lists=[]))

    def close(self) -> None:
        self._slots.close()
        close_all(self.workers)

    async def run(self, job: Callable[[Worker], _T]) -> _T:
        """Run `job` on a thread with one of the workers.

        Raises QueueFull when too many jobs wait, EngineError during the shutdown, and what the job raises.
        """
        async with self._slots.slot() as slot:
            return await slot.run(job)
