"""Processes for what may never end or is not trusted: decoding media, chat templates, tokenizers, grammars.

`Sandbox` starts a process, sends it a setup, then one job at a time over pipes: a length, JSON, and bytes. A job that
exceeds its CPU time or memory ends that process and nothing else, and the next job starts a new one. `Fence` sets the
limits on the process's side.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

_HEAD = struct.Struct("<Q")
_STREAMS = 3  # stdin, stdout and stderr: the only file descriptors that may be open
_WALL = 4  # wall-clock time of a job, as a multiple of its CPU time: the machine may be busy
START_SECONDS = 60  # time to start a process: it imports libraries, or loads a large vocabulary
_T = TypeVar("_T")
Ending = Literal["closed", "interrupted", "late", "dead"]


def write(stream: IO[bytes], value: Any, *payloads: Any) -> None:
    """Send a value as JSON after its length, then the payloads' bytes."""
    data = json.dumps(value).encode()
    stream.write(_HEAD.pack(len(data)))
    stream.write(data)
    for payload in payloads:
        stream.write(payload)
    stream.flush()


def read(stream: IO[bytes], most: int | None = None) -> Any:
    """Receive a value as `write` sends it; raise EOFError when the other side is gone or sends more than `most`."""
    (size,) = _HEAD.unpack(read_exactly(stream, _HEAD.size))
    if most is not None and size > most:
        raise EOFError
    return json.loads(read_exactly(stream, size))


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Read so many bytes; raise EOFError when there are fewer."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


class Fence:
    """Resource limits of this process, which the kernel enforces: exceeding them fails or kills the process.

    seconds: CPU time of one job. memory: bytes of address space beyond what is in use when it is limited.
    """

    def __init__(self, seconds: float, memory: int) -> None:
        import resource

        self._resource, self._seconds, self._memory = resource, seconds, memory
        self._set(resource.RLIMIT_CORE, 0)

    def allow_seconds(self, seconds: float | None = None) -> None:
        """Allow this much CPU time from now on; by default that of a job."""
        usage = self._resource.getrusage(self._resource.RUSAGE_SELF)
        limit = int(usage.ru_utime + usage.ru_stime + (seconds or self._seconds)) + 1
        self._set(self._resource.RLIMIT_CPU, limit, is_final=False)

    def limit_memory(self) -> None:
        """Limit the address space for good; later calls have no effect."""
        table = Path("/proc/self/statm")
        if self._memory and table.exists():  # only Linux enforces this limit
            used = int(table.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            self._set(self._resource.RLIMIT_AS, used + self._memory)
        self._memory = 0

    def close(self) -> None:
        """Forbid opening files and sockets and starting processes, for good."""
        self._set(self._resource.RLIMIT_FSIZE, 0)
        self._set(self._resource.RLIMIT_NPROC, 0)
        self._set(self._resource.RLIMIT_NOFILE, _STREAMS)

    def _set(self, limit: int, value: int, *, is_final: bool = True) -> None:
        hard = self._resource.getrlimit(limit)[1]
        value = value if hard < 0 else min(value, hard)
        self._resource.setrlimit(limit, (value, value if is_final else hard))


class Sandbox:
    """One process, started for the first job and reused for the next ones; replaced if it had to be killed.

    module: whose `main` runs in the process. environment: of the process, beside the paths of modules. setup: sent to
    it first; it has the `seconds` of CPU time and the bytes of `memory` of a job. start_seconds: the wall-clock time of
    a job beyond that for its CPU time. is_quiet: what the process writes to stderr is discarded.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        setup: dict[str, Any],
        *,
        start_seconds: float = 0,
        is_quiet: bool = False,
    ) -> None:
        self._module, self._environment, self._setup = module, environment, setup
        self._seconds = start_seconds + _WALL * setup["seconds"]
        self._stderr = subprocess.DEVNULL if is_quiet else None
        self._process: subprocess.Popen[bytes] | None = None
        self._start_lock = threading.Lock()  # held until the process can be given a job
        self._lock = threading.Lock()  # held while the process is started or taken out of use
        self._is_closed = self._is_asking = self._is_interrupted = False

    # ---- what differs

    def greet(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """Give a new process its setup."""
        with contextlib.suppress(OSError):  # it has ended, which the job finds
            write(stdin, self._setup)

    def failure(self, ending: Ending, code: int) -> Exception:
        """Return the error of a job whose process has ended, with this exit code. ending: the cause."""
        raise NotImplementedError

    # ---- jobs

    def start(self) -> None:
        """Start the process, if there is none."""
        self._ensure_started()

    def run(self, job: Callable[[IO[bytes], IO[bytes]], _T]) -> _T:
        """Run a function that talks to the process over its stdin and stdout; raise `failure` if that fails.

        The function raises EOFError or ValueError for an answer that cannot be right.
        """
        process = self._ensure_started()
        self._is_asking = True
        try:
            with _killed_after(process, self._seconds) as was_killed:
                return job(*_streams(process))
        except (EOFError, OSError, ValueError) as error:
            ending: Ending = "interrupted" if self._is_interrupted else "closed" if self._is_closed else "dead"
            self.end()
            if ending == "dead" and (was_killed.is_set() or process.returncode == -signal.SIGXCPU):
                ending = "late"
            raise self.failure(ending, process.returncode) from (None if ending == "interrupted" else error)
        finally:
            self._is_asking = False
            if self._is_interrupted:  # perhaps after the answer was read
                self.end()

    def interrupt(self) -> None:
        """End the job in progress, if there is one; `run` then raises the `failure` of an interruption."""
        with self._lock:
            if self._is_asking and self._process is not None:
                self._is_interrupted = True
                self._process.kill()

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        """Return the running process; start a new one if the last one has ended."""
        with self._start_lock:
            with self._lock:
                if self._is_closed:
                    raise self.failure("closed", 0)
                if self._process is not None and self._process.poll() is None:
                    return self._process
                process = self._process = self._start()
            with _killed_after(process, START_SECONDS):
                self.greet(*_streams(process))
            return process

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the process in its own session, so that Ctrl-C reaches this process alone and requests end first."""
        paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**self._environment, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    def end(self) -> int | None:
        """Kill the process and wait for its end; the next job starts a new one. Returns its exit code."""
        with self._lock:
            process, self._process, self._is_interrupted = self._process, None, False
        if process is None:
            return None
        process.kill()
        process.wait()
        for stream in _streams(process):
            with contextlib.suppress(OSError):  # closing flushes, and the process no longer reads
                stream.close()
        return process.returncode

    def kill(self) -> None:
        """Kill the process for good: a running job ends with an error, and no new process is started."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()


def close_all(sandboxes: Sequence[Sandbox]) -> None:
    """Kill the processes for good and wait for their end."""
    for sandbox in sandboxes:
        sandbox.kill()
    for sandbox in sandboxes:
        sandbox.end()


def _streams(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@contextlib.contextmanager
def _killed_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """Kill the process after so many seconds, which ends any read or write that waits for it.

    Yields an event that is set if the process was killed.
    """
    was_killed = threading.Event()

    def kill() -> None:
        was_killed.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield was_killed
    finally:
        timer.cancel()
