"""Start, watch and end the ranks of a distributed run. The calling process is rank 0.

Rank 0 starts the other ranks as child processes, or torchrun has started all of them. They exchange messages through a
key-value store: rank 0 publishes the settings, the other ranks publish their results and errors. When a rank is lost
the run ends: rank 0 raises that rank's error, and no process is left running, however rank 0 ends. The work of the
ranks is in tensor_parallel.py.
"""

import contextlib
import importlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed

from whorl.device import HOST, collective_backend, device_count, tune_collectives, use_device

COMMAND = [sys.executable, "-c", "from whorl.engine.launch import follow; follow()"]
_TURN = timedelta(seconds=120)  # a rank that does not join a collective within this time is stuck
_IDLE = timedelta(days=365)  # waiting for requests or for weights may take long
_GRACE = 5.0  # seconds that a lost rank has to publish its error, and that ranks have to end by themselves
_STUCK = 15.0  # seconds until this process ends: an accelerator's collective with a lost rank never returns
_BEAT = 1.0  # seconds between the signs of life of a rank
_SILENT = 3.0  # seconds without one, after which a rank counts as stopped
_LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)


class RankError(RuntimeError):
    """A rank failed or was lost; the message contains that rank's error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """The rank of this process and the number of ranks.

    is_external: torchrun or another launcher has started the ranks; False: rank 0 starts them.
    """

    rank: int
    size: int
    local_rank: int
    is_external: bool

    @classmethod
    def find(cls, num_ranks: int | None = None) -> "RankPlace":
        """Return the place by torchrun's environment variables; without them, rank 0 of `num_ranks`.

        num_ranks: the value of tp; None: as many as torchrun has started, or 1. ValueError if they disagree."""
        env = os.environ
        size = int(env["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys() else 1
        if num_ranks == 1 or size == 1:
            return cls(rank=0, size=num_ranks or 1, local_rank=0, is_external=False)
        if num_ranks not in (None, size):
            raise ValueError(f"tensor parallel: tp is {num_ranks}, and torchrun has started {size} ranks")
        rank = int(env["RANK"])
        return cls(rank=rank, size=size, local_rank=int(env.get("LOCAL_RANK", rank)), is_external=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Host and port of the key-value store. server: the store itself, in the process that runs it."""

    host: str
    port: int
    server: Any = None

    @classmethod
    def open(cls) -> "Address":
        """Start a new store on a free port that only this machine can reach."""
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen()
            port = listener.getsockname()[1]
            options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
            server = distributed.TCPStore(_LOOPBACK, port, is_master=True, timeout=_TURN, **options)
        return cls(host=_LOOPBACK, port=port, server=server)

    @classmethod
    def from_environment(cls, rank: int) -> "Address":
        """Return the address in MASTER_ADDR and MASTER_PORT; if torchrun runs no store there, rank 0 starts one."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        server = None
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            server = distributed.TCPStore(host, port, is_master=True, timeout=_TURN, wait_for_workers=False)
        return cls(host=host, port=port, server=server)

    def connect(self) -> distributed.Store:
        """Return a new client of the store: a client serves one thread at a time."""
        store = distributed.TCPStore(self.host, self.port, is_master=False, timeout=_TURN, wait_for_workers=False)
        # torchrun's store outlives the ranks, so the keys of a restart need a prefix of their own.
        return distributed.PrefixStore(f"whorl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Rank:
    """One rank: its client of the store and its process groups."""

    def __init__(self, place: RankPlace, device: str, store: distributed.Store) -> None:
        self.rank, self.size, self.device, self._store = place.rank, place.size, device, store
        self.control: Any = None  # a gloo group, in which ranks may wait for rank 0 without a time limit
        self._is_local, self._has_joined = not place.is_external, False
        use_device(device, place.local_rank)

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value under a key that all ranks can read."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return the value of a key; wait until it has been put."""
        self._store.wait([key], _IDLE)
        return json.loads(self._store.get(key))

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def publish(self, key: str, value: Any) -> None:
        """Put this rank's value of a key, for rank 0 to `collect`."""
        self.put(f"{key}/{self.rank}", value)

    def join(self) -> None:
        """Create the process groups. Every rank must call this at the same time."""
        self._has_joined = True
        hook = sys.excepthook
        with _loopback() if self._is_local else contextlib.nullcontext():
            distributed.init_process_group(
                collective_backend(self.device),
                store=distributed.PrefixStore("groups", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=_TURN,
            )
            self.control = distributed.new_group(backend="gloo", timeout=_IDLE if self.rank else _TURN)
        sys.excepthook = hook  # torch installs one that puts "[rank0]:" before every line

    def leave(self) -> None:
        """Destroy the process groups."""
        self.control = None
        if self._has_joined and distributed.is_initialized():
            distributed.destroy_process_group()


# ---- rank 0


class RankGroup(Rank):
    """Rank 0, which controls the other ranks. `close` ends them."""

    def __init__(
        self, place: RankPlace, device: str, address: Address, processes: Sequence[subprocess.Popen[bytes]] = ()
    ) -> None:
        super().__init__(place, device, address.connect())
        self._address = address
        self._processes = dict(enumerate(processes, 1))
        self._num_threads = torch.get_num_threads()
        if processes and device == HOST and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(_num_threads(place.size))
        self._failure: str | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}  # each rank's last sign of life, and when it was new
        self._is_closed = self._is_busy = False
        self._turn = threading.RLock()  # weights come on a thread of their own
        self._watcher = threading.Thread(target=self._watch, name="whorl-ranks", daemon=True)
        self._watcher.start()

    def collect(self, key: str) -> list[Any]:
        """Return what every other rank published under a key, in order of rank; RankError if one is lost."""
        keys = [f"{key}/{rank}" for rank in range(1, self.size)]
        while not self._store.check(keys):
            self._raise_failure()
            time.sleep(0.02)
        return [json.loads(self._store.get(key)) for key in keys]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Enclose what all ranks do together, on one thread at a time. An error inside ends all ranks, because they no
        longer agree on the next step. So Ctrl-C waits for the end of the block; a second Ctrl-C does not wait."""
        self._raise_failure()
        if self._is_closed:
            raise RankError("tensor parallel: the ranks have been closed; create a new LLM")
        # Around the try: Ctrl-C just before or after the block breaks nothing.
        with self._turn, _interrupts_wait() as interrupted:
            self._is_busy = True
            try:
                yield
            except BaseException as error:
                reason = self._reason(_GRACE) if _is_echo(error) else None
                self.close(is_broken=True)
                if reason is not None:
                    self._failure = reason
                    raise RankError(reason) from error
                raise
            finally:
                self._is_busy = False
        if interrupted.is_set():
            raise KeyboardInterrupt

    def close(self, *, is_broken: bool = False, ask_to_end: Callable[[], None] | None = None) -> None:
        """End the other ranks. ask_to_end: tells them to end by themselves. is_broken: kill them without asking."""
        if self._is_closed:
            return
        self._is_closed, is_broken = True, is_broken or self._failure is not None
        if not is_broken:
            with contextlib.suppress(RuntimeError):  # a rank that has already ended cannot be asked
                if ask_to_end is not None and self.control is not None:
                    ask_to_end()
                    self._wait(_GRACE)
                self.leave()
        self._kill()
        if is_broken and self.device == HOST:  # an accelerator's library would wait for the ranks that have ended
            with contextlib.suppress(RuntimeError):
                self.leave()
        torch.set_num_threads(self._num_threads)

    @property
    def problem(self) -> str | None:
        """Why the ranks cannot take part in a step now: one is lost, or stopped, and then may go on; None: they can."""
        now = time.monotonic()
        silent = ((rank, now - since) for rank, (_, since) in list(self._beats.items()) if now - since > _SILENT)
        stopped = (f"tensor parallel: rank {rank} has been stopped for {seconds:.0f} s" for rank, seconds in silent)
        return self._failure or next(stopped, None)

    # ---- loss

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.close(is_broken=True)
            raise RankError(self._failure)

    def _reason(self, seconds: float) -> str:
        """Return why a rank was lost; wait up to `seconds` to find out."""
        deadline = time.monotonic() + seconds
        while (reason := self._lost()) is None:
            if time.monotonic() > deadline:
                return f"tensor parallel: a rank did not answer within {_TURN.seconds} s, and none has failed"
            time.sleep(0.05)
        return reason

    def _lost(self, store: distributed.Store | None = None) -> str | None:
        """Return why a rank was lost, or None. A rank's own error is preferred to an exit without one, and both to
        errors of collectives, which only follow from the loss of another rank."""
        store = store or self._store
        ended = {rank: process.poll() for rank, process in self._processes.items()}
        errors: dict[int, Any] = {}
        for rank in range(1, self.size):
            if store.check([f"error/{rank}"]):
                errors[rank] = json.loads(store.get(f"error/{rank}"))
        for rank, error in errors.items():
            if not error["is_echo"]:
                return f"tensor parallel: rank {rank} failed:\n{error['text']}"
        for rank, code in ended.items():
            if code is not None and rank not in errors:
                ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"tensor parallel: rank {rank} {ending}"
        # Collectives failed, but the rank that caused it may not have been seen to end yet.
        if errors and all(rank in errors or code is not None for rank, code in ended.items()):
            rank, error = next(iter(errors.items()))
            return f"tensor parallel: rank {rank} failed:\n{error['text']}"
        return None

    def _watch(self) -> None:
        """Watch for lost ranks. Rank 0 usually notices one at its next exchange. But it may be waiting in an
        accelerator's collective, which never returns; then this thread ends the process."""
        store = self._address.connect()
        while not self._is_closed and self._failure is None:
            failure = self._lost(store)
            if not self._is_closed:
                self._failure = failure
            self._hear(store)
            time.sleep(0.2)
        deadline = time.monotonic() + _STUCK
        while not self._is_closed and (self._is_busy or self.device != HOST):
            if time.monotonic() > deadline:
                print(f"whorl: {self._failure}", file=sys.stderr, flush=True)
                self._kill()
                os._exit(1)
            time.sleep(0.2)

    def _hear(self, store: distributed.Store) -> None:
        """Note which ranks have given a new sign of life; one that has given none yet is still starting."""
        for rank in range(1, self.size):
            beat = store.get(key) if store.check([key := f"beat/{rank}"]) else None
            if beat is not None and beat != self._beats.get(rank, (None,))[0]:
                self._beats[rank] = beat, time.monotonic()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._wait(_GRACE)
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()


def start(place: RankPlace, device: str, job: str, settings: dict[str, Any], *, tune: bool = True) -> RankGroup:
    """Start the ranks and return rank 0's group. job: "module:function", which every other rank calls with its `Rank`;
    it reads `settings` from there. tune: set the environment variables that speed collectives up.

    If torchrun started the ranks, this returns on rank 0 only: on the others it runs the job and ends the process.
    Raises ValueError if torch.distributed is in use or there are fewer devices than ranks.
    """
    if distributed.is_initialized():
        raise ValueError("tensor parallel: torch.distributed is in use in this process; close the other engine first")
    num_devices = device_count(device)
    if not place.is_external and num_devices is not None and place.size > num_devices:
        raise ValueError(
            f"tensor parallel: tp is {place.size}; this machine has {num_devices} {device} devices, one for each rank"
        )
    if tune and (variables := tune_collectives(device)) and place.rank == 0:
        log.warning("tensor parallel: set %s", " ".join(f"{name}={value}" for name, value in variables.items()))
    if place.is_external and place.rank > 0:
        _work(place, Address.from_environment(place.rank), job, device)
    if place.is_external:
        group = RankGroup(place, device, Address.from_environment(0))
        if group.has("settings"):
            raise ValueError("tensor parallel: ranks that torchrun started serve one engine only; this is the second")
    else:
        address = Address.open()
        processes = [_spawn(rank, place.size, address, job, device) for rank in range(1, place.size)]
        group = RankGroup(place, device, address, processes)
    group.put("settings", settings)
    return group


def _spawn(rank: int, size: int, address: Address, job: str, device: str) -> "subprocess.Popen[bytes]":
    """Start a rank in a new interpreter; a fork would share this one's threads, spawn would run its main module."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    if device == HOST:
        environment.setdefault("OMP_NUM_THREADS", str(_num_threads(size)))
    return subprocess.Popen(
        [*COMMAND, job, device],
        # Nothing is written to the pipe. It closes when rank 0 ends for any reason, which ends the child as well.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C reaches rank 0 alone, also while the child imports
    )


def _num_threads(size: int) -> int:
    """Return how many CPU threads each of `size` ranks may use."""
    return max(1, len(os.sched_getaffinity(0)) // size if hasattr(os, "sched_getaffinity") else 1)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo use the loopback interface, so that ranks of one machine cannot be reached from others."""
    is_set = sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ
    if not is_set:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if not is_set:
            del os.environ["GLOO_SOCKET_IFNAME"]


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[threading.Event]:
    """Delay Ctrl-C: the first one only sets the event. A handler that the caller has installed is left in place."""
    interrupted = threading.Event()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(number: int, frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- the other ranks


def follow() -> NoReturn:
    """Run as the main function of a rank that rank 0 has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher may send it to all processes; rank 0 handles it
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    rank = int(os.environ["RANK"])
    place = RankPlace(rank=rank, size=int(os.environ["WORLD_SIZE"]), local_rank=rank, is_external=False)
    _work(place, Address.from_environment(rank), *sys.argv[1:3])


def _end_with_rank_0() -> NoReturn:
    """End this process when rank 0 has ended and its end of the pipe is closed."""
    sys.stdin.buffer.read()
    os._exit(1)


def _work(place: RankPlace, address: Address, job: str, device: str) -> NoReturn:
    """Call the job; publish its error if it fails; then end the process."""
    store = address.connect()
    threading.Thread(target=_beat, args=(place.rank, address.connect()), daemon=True).start()
    try:
        rank = Rank(place, device, store)
        module, _, name = job.partition(":")
        getattr(importlib.import_module(module), name)(rank)
        rank.leave()
    except BaseException as error:
        text = traceback.format_exc()
        with contextlib.suppress(RuntimeError):
            store.set(f"error/{place.rank}", json.dumps({"text": text, "is_echo": _is_echo(error)}))
        if place.is_external:
            print(f"whorl: rank {place.rank} failed:\n{text}", file=sys.stderr, flush=True)
        _end(1)
    _end(0)


def _beat(rank: int, store: distributed.Store) -> None:
    """Give signs of life until rank 0 ends: a process that is stopped is alive, and its connections are open."""
    with contextlib.suppress(RuntimeError):
        for number in itertools.count():
            store.set(f"beat/{rank}", str(number))
            time.sleep(_BEAT)


def _end(code: int) -> NoReturn:
    """End the process at once: an interpreter with broken process groups may hang when it exits normally."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_echo(error: BaseException) -> bool:
    """Return whether the error only follows from the loss of another rank: a collective raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and bool(frames) and "distributed" in Path(frames[-1].filename).parts
