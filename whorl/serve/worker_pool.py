"""Processes that do what may take for ever (see `worker`), each with a thread here that waits for it.

A job that takes too much time or memory is ended with its process, and the next one gets a new process. So every thread
is free again after a known time, and stopping waits for none.
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

from .engine_thread import EngineError, QueueFull
from .gate import ApiError
from .worker import OVER_MEMORY, read, write

_T = TypeVar("_T")
_WALL = 4  # how many times its CPU time a job may take by the clock, on a machine with other things to do
_START_SECONDS = 60.0  # by the clock, more: for a new process and a large vocabulary
_CODES = {"length": "context_length_exceeded", "memory": "too_costly"}
_PARAMS = {"template": "messages"}


class Worker:
    """One process, which is started for a job and kept for the next."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and ending
        self._is_closed = False

    def ask(self, name: str, **arguments: Any) -> Any:
        """The value of a job of `worker.Jobs`; ApiError where it is refused, or had to be ended."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = self._setup["seconds"]
        try:
            write(process.stdin, (name, arguments))
            if not select.select([process.stdout], [], [], _START_SECONDS + _WALL * seconds)[0]:
                self.end()
                raise ApiError(400, f"it takes longer than {seconds:g} seconds", code="too_costly")
            found = read(process.stdout)
        except (EOFError, OSError) as error:
            self.end()
            raise self._death(process.returncode) from error
        if "value" in found:
            return found["value"]
        if "failed" in found:  # as Rust's panics
            raise ApiError(400, f"the request cannot be prepared: {found['failed']}", code="preparation_failed")
        kind = found["kind"]
        raise ApiError(400, found["refused"], code=_CODES.get(kind), param=_PARAMS.get(kind))

    def _started(self) -> "subprocess.Popen[bytes]":
        """The process, which is new where the last one has ended."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the server is shutting down")
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
                assert self._process.stdin is not None
                write(self._process.stdin, self._setup)
            return self._process

    def end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not written goes nowhere
                stream.close()

    def close(self) -> None:
        """For good: a job that is running ends with an error."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _death(self, code: int) -> Exception:
        if self._is_closed:
            return EngineError("the server is shutting down")
        if code == -signal.SIGXCPU:
            return ApiError(400, f"it takes longer than {self._setup['seconds']:g} seconds", code="too_costly")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ApiError(400, f"{OVER_MEMORY}, or it crashed ({how})", code="too_costly")


def _start() -> "subprocess.Popen[bytes]":
    """In a session of its own, so that Ctrl-C ends the requests first."""
    places = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    settings = {"PYTHONPATH": os.pathsep.join(places), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "whorl.serve.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | settings,
        start_new_session=True,
    )


class WorkerPool:
    """what: the jobs are about. setup: of its workers: the tokenizer's state, and the seconds of CPU time and bytes of
    memory that a job may take. max_queue: jobs that may wait."""

    def __init__(self, what: str, setup: dict[str, Any], *, max_queue: int, size: int = 2) -> None:
        self.what, self.size, self._max_queue = what, size, max_queue
        self._workers = [Worker(setup) for _ in range(size)]
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()  # the one used last is warm
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=f"whorl-{what}")
        self._since: dict[object, float] = {}  # jobs that are not done, the oldest first

    async def start(self) -> None:
        """Make one process ready; the others start when several jobs come at once."""
        await self.run(lambda worker: worker.ask("decode", lists=[]))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()

    async def run(self, job: Callable[[Worker], _T]) -> _T:
        """On one of the pool's threads, with one of its processes at hand."""
        if len(self._since) >= self.size + self._max_queue:
            raise QueueFull(f"{len(self._since)} requests are being prepared already")
        name = object()
        self._since[name] = time.perf_counter()
        try:
            future = self._threads.submit(self._with_worker, job)
        except RuntimeError:
            del self._since[name]
            raise EngineError("the server is shutting down") from None
        future.add_done_callback(lambda _: self._since.pop(name))
        return await asyncio.wrap_future(future)

    def stuck(self, seconds: float) -> str | None:
        """What is wrong where a job has waited and run for longer than this."""
        oldest = time.perf_counter() - next(iter(self._since.values()), time.perf_counter())
        if oldest <= seconds:
            return None
        return f"{len(self._since)} jobs for the {self.size} {self.what} workers are not done, one for {oldest:.0f} s"

    def _with_worker(self, job: Callable[[Worker], _T]) -> _T:
        worker = self._free.get()
        try:
            return job(worker)
        finally:
            self._free.put(worker)
