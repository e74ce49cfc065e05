"""Pools of worker processes (see `worker`); clients take turns, see `fair_slots`.

A job that exceeds its time or memory is killed with its process, and the next job starts a new process. So is one whose
client left. So every worker is free again after a bounded time, and shutting down waits for none.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from whorl.media.decoder import killed_after

from .api_error import ApiError
from .engine_thread import EngineError
from .fair_slots import FairSlots
from .worker import OVER_MEMORY, read, write

_T = TypeVar("_T")
_WALL = 4  # wall-clock time of a job, as a multiple of its CPU time: the machine may be busy
_START_SECONDS = 60.0  # wall-clock time on top of that, to start a process and load a large vocabulary
_SIZE = 3  # one client may have all but one of them
_CODES = {"length": "context_length_exceeded", "memory": "too_costly"}
_PARAMS = {"template": "messages"}


class Interrupted(Exception):
    """A job was ended because its client left; nobody is told."""


class Worker:
    """One worker process, which is started for the first job and reused for the next ones."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held while the process is started or taken out of use
        self._is_closed = self._is_asking = self._is_interrupted = False

    def start(self) -> None:
        """Start the process, if there is none."""
        self._ensure_started()

    def interrupt(self) -> None:
        """End the job in progress, if there is one; `ask` then raises Interrupted."""
        with self._lock:
            if self._is_asking and self._process is not None:
                self._is_interrupted = True
                self._process.kill()

    def ask(self, name: str, **arguments: Any) -> Any:
        """Run a job of `worker.Jobs` and return its value; raise ApiError when it is refused or had to be killed."""
        process = self._ensure_started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._is_asking = True
        try:
            with killed_after(process, _START_SECONDS + _WALL * self._setup["seconds"]) as was_killed:
                write(process.stdin, (name, arguments))
                result = read(process.stdout)
        except (EOFError, OSError) as error:
            was_interrupted = self._is_interrupted
            self.end()
            if was_interrupted:
                raise Interrupted from None
            raise self._death(process.returncode, is_late=was_killed.is_set()) from error
        finally:
            self._is_asking = False
            if self._is_interrupted:  # perhaps after the result was read
                self.end()
        if "value" in result:
            return result["value"]
        if "failed" in result:  # for example by a panic of a Rust library
            raise ApiError(400, f"the request cannot be prepared: {result['failed']}", code="preparation_failed")
        kind = result["kind"]
        raise ApiError(400, result["refused"], code=_CODES.get(kind), param=_PARAMS.get(kind))

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        """Return the running process; start a new one if the last one has ended."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the server is shutting down")
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
                assert self._process.stdin is not None
                write(self._process.stdin, self._setup)
            return self._process

    def end(self) -> None:
        """Kill the process and wait for its end; the next job starts a new one."""
        with self._lock:
            process, self._process, self._is_interrupted = self._process, None, False
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # closing flushes, and the process no longer reads
                stream.close()

    def close(self) -> None:
        """Kill the process for good: a running job ends with an error, and no new process is started."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _death(self, code: int, *, is_late: bool) -> Exception:
        """Return the error that explains the process's exit code. is_late: it was killed for its wall-clock time."""
        if self._is_closed:
            return EngineError("the server is shutting down")
        if is_late or code == -signal.SIGXCPU:
            return ApiError(400, f"it takes longer than {self._setup['seconds']:g} seconds", code="too_costly")
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ApiError(400, f"{OVER_MEMORY}, or it crashed ({cause})", code="too_costly")


def _start() -> "subprocess.Popen[bytes]":
    """Start a worker in its own session, so that Ctrl-C reaches the server alone and requests end first."""
    paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "whorl.serve.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | variables,
        start_new_session=True,
    )


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
        for worker in self.workers:
            worker.close()
        self._slots.close()
        for worker in self.workers:
            worker.end()

    async def run(self, job: Callable[[Worker], _T]) -> _T:
        """Run `job` on a thread with one of the workers.

        Raises QueueFull when too many jobs wait, EngineError during the shutdown, and what the job raises.
        """
        async with self._slots.slot() as slot:
            return await slot.run(job)
