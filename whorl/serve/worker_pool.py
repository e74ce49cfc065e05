"""Pools of worker processes (see `worker`), each with a thread here that waits for its result.

A job that exceeds its time or memory is killed with its process, and the next job starts a new process. So every thread
is free again after a bounded time, and shutting down waits for none.
"""

import asyncio
import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from .api_error import ApiError
from .engine_thread import EngineError, QueueFull
from .worker import OVER_MEMORY, read, write

_T = TypeVar("_T")
_WALL = 4  # wall-clock time of a job, as a multiple of its CPU time: the machine may be busy
_START_SECONDS = 60.0  # wall-clock time on top of that, to start a process and load a large vocabulary
_CODES = {"length": "context_length_exceeded", "memory": "too_costly"}
_PARAMS = {"template": "messages"}


class Worker:
    """One worker process, which is started for the first job and reused for the next ones."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held while the process is started or taken out of use
        self._is_closed = False

    def ask(self, name: str, **arguments: Any) -> Any:
        """Run a job of `worker.Jobs` and return its value; raise ApiError when it is refused or had to be killed."""
        process = self._ensure_started()
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = self._setup["seconds"]
        try:
            write(process.stdin, (name, arguments))
            if not select.select([process.stdout], [], [], _START_SECONDS + _WALL * seconds)[0]:
                self.end()
                raise ApiError(400, f"it takes longer than {seconds:g} seconds", code="too_costly")
            result = read(process.stdout)
        except (EOFError, OSError) as error:
            self.end()
            raise self._death(process.returncode) from error
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
            process, self._process = self._process, None
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

    def _death(self, code: int) -> Exception:
        """Return the error that explains the process's exit code."""
        if self._is_closed:
            return EngineError("the server is shutting down")
        if code == -signal.SIGXCPU:
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
    """Runs jobs on `size` worker processes.

    kind: names the pool in thread names and messages. setup: sent to each worker: the tokenizer's state, and the
    seconds of CPU time and bytes of memory that a job may use. max_queue: how many jobs may wait.
    """

    def __init__(self, kind: str, setup: dict[str, Any], *, max_queue: int, size: int = 2) -> None:
        self.kind, self.size, self._max_queue = kind, size, max_queue
        self._workers = [Worker(setup) for _ in range(size)]
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()  # the worker used last is warm
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=f"whorl-{kind}")
        self._since: dict[object, float] = {}  # when each unfinished job was submitted, the oldest first

    async def start(self) -> None:
        """Start one process; the others start when several jobs come at once."""
        await self.run(lambda worker: worker.ask("decode", lists=[]))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()

    async def run(self, job: Callable[[Worker], _T]) -> _T:
        """Run `job` on one of the pool's threads with one of its workers.

        Raises QueueFull when too many jobs wait, EngineError during the shutdown, and what the job raises.
        """
        if len(self._since) >= self.size + self._max_queue:
            raise QueueFull(f"{len(self._since)} requests are being prepared already")
        key = object()
        self._since[key] = time.perf_counter()
        try:
            future = self._threads.submit(self._with_worker, job)
        except RuntimeError:
            del self._since[key]
            raise EngineError("the server is shutting down") from None
        future.add_done_callback(lambda _: self._since.pop(key))
        return await asyncio.wrap_future(future)

    def stall_report(self, seconds: float) -> str | None:
        """Describe the stall when the oldest job has waited and run for longer than `seconds`; else None."""
        oldest = time.perf_counter() - next(iter(self._since.values()), time.perf_counter())
        if oldest <= seconds:
            return None
        return f"{len(self._since)} jobs for the {self.size} {self.kind} workers are not done, one for {oldest:.0f} s"

    def _with_worker(self, job: Callable[[Worker], _T]) -> _T:
        worker = self._free.get()
        try:
            return job(worker)
        finally:
            self._free.put(worker)
