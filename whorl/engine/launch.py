"""Ranks: processes that work together, of which the calling one is rank 0.

Rank 0 starts the others itself, or torchrun has started them all. They meet in a key-value store, where rank 0 leaves
what they are to do and they leave what they have to say, their errors included. A rank that is lost ends the run: rank
0 raises its error, and no process stays behind, however rank 0 ends. What ranks do is in tensor_parallel.py.
"""

import contextlib
import importlib
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
_TURN = timedelta(seconds=120)  # a rank that does not come to a collective in this time is stuck
_IDLE = timedelta(days=365)  # waiting for work, or for weights, may take long
_GRACE = 5.0  # seconds: for a lost rank's last words, and for ranks to end by themselves
_STUCK = 15.0  # seconds: an accelerator's collective with a lost rank never returns; then the process ends
_LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)


class RankError(RuntimeError):
    """A rank failed or was lost; the message has its own error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which rank this process is. is_given: torchrun, or somebody like it, has started the ranks."""

    rank: int
    size: int
    local_rank: int
    is_given: bool

    @classmethod
    def find(cls, asked: int | None = None) -> "Place":
        """asked: ranks wanted; None: those that torchrun started, else one."""
        given = os.environ
        size = int(given["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= given.keys() else 1
        if asked == 1 or size == 1:
            return cls(rank=0, size=asked or 1, local_rank=0, is_given=False)
        if asked not in (None, size):
            raise ValueError(f"tensor parallel: {asked} ranks were asked for, and torchrun has started {size}")
        rank = int(given["RANK"])
        return cls(rank=rank, size=size, local_rank=int(given.get("LOCAL_RANK", rank)), is_given=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Of the store. server: keeps it alive in the process that holds it."""

    host: str
    port: int
    server: Any = None

    @classmethod
    def open(cls) -> "Address":
        """A new store, on a free port that only this machine reaches."""
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen()
            port = listener.getsockname()[1]
            options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
            server = distributed.TCPStore(_LOOPBACK, port, is_master=True, timeout=_TURN, **options)
        return cls(host=_LOOPBACK, port=port, server=server)

    @classmethod
    def given(cls, rank: int) -> "Address":
        """That of the environment; where torchrun keeps no store there, rank 0 does."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        server = None
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            server = distributed.TCPStore(host, port, is_master=True, timeout=_TURN, wait_for_workers=False)
        return cls(host=host, port=port, server=server)

    def connect(self) -> distributed.Store:
        """A client of its own: one serves one thread at a time."""
        store = distributed.TCPStore(self.host, self.port, is_master=False, timeout=_TURN, wait_for_workers=False)
        # torchrun's store is there before us, and still there when it starts the ranks again.
        return distributed.PrefixStore(f"whorl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Rank:
    """One rank's side of the store and of the process groups."""

    def __init__(self, place: Place, device: str, store: distributed.Store) -> None:
        self.rank, self.size, self.device, self._store = place.rank, place.size, device, store
        self.control: Any = None  # a group on the host, where ranks may wait for rank 0 for ever
        self._is_local, self._has_joined = not place.is_given, False
        use_device(device, place.local_rank)

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Waits until it is there."""
        self._store.wait([key], _IDLE)
        return json.loads(self._store.get(key))

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def say(self, key: str, value: Any) -> None:
        self.put(f"{key}/{self.rank}", value)

    def join(self) -> None:
        """Connect with the others; all ranks must be at this point."""
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
        sys.excepthook = hook  # torch's puts "[rank0]:" before every line

    def leave(self) -> None:
        self.control = None
        if self._has_joined and distributed.is_initialized():
            distributed.destroy_process_group()


# ---- rank 0


class RankGroup(Rank):
    """Rank 0, and its hold on the others. `close` ends them."""

    def __init__(
        self, place: Place, device: str, address: Address, processes: Sequence[subprocess.Popen[bytes]] = ()
    ) -> None:
        super().__init__(place, device, address.connect())
        self._address = address
        self._processes = dict(enumerate(processes, 1))
        self._num_threads = torch.get_num_threads()
        if processes and device == HOST and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(_threads(place.size))
        self._failure: str | None = None
        self._is_closed = self._is_busy = False
        self._watcher = threading.Thread(target=self._watch, name="whorl-ranks", daemon=True)
        self._watcher.start()

    def collect(self, key: str) -> list[Any]:
        """What every other rank says, in order; raises when one is lost instead."""
        keys = [f"{key}/{rank}" for rank in range(1, self.size)]
        while not self._store.check(keys):
            self._raise_failure()
            time.sleep(0.02)
        return [json.loads(self._store.get(key)) for key in keys]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do. An error in it ends them all, since they no longer agree on what comes next. So
        Ctrl-C waits for the end of it; a second one does not."""
        self._raise_failure()
        if self._is_closed:
            raise RankError("tensor parallel: the ranks have been ended")
        self._is_busy = True
        try:
            with _interrupts_wait() as asked:
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
        if asked.is_set():
            raise KeyboardInterrupt

    def close(self, *, is_broken: bool = False, goodbye: Callable[[], None] | None = None) -> None:
        """End the other ranks. goodbye: tells them to end by themselves."""
        if self._is_closed:
            return
        self._is_closed = True
        if not is_broken and self._failure is None:
            with contextlib.suppress(RuntimeError):  # one that is gone needs no goodbye
                if goodbye is not None and self.control is not None:
                    goodbye()
                    self._wait(_GRACE)
                self.leave()
        self._kill()
        if is_broken and self.device == HOST:  # an accelerator's library would wait for the ranks that are gone
            with contextlib.suppress(RuntimeError):
                self.leave()
        torch.set_num_threads(self._num_threads)

    # ---- loss

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.close(is_broken=True)
            raise RankError(self._failure)

    def _reason(self, seconds: float) -> str:
        """Why a rank was lost, found out in `seconds`."""
        deadline = time.monotonic() + seconds
        while (reason := self._lost()) is None:
            if time.monotonic() > deadline:
                return f"tensor parallel: a rank did not answer within {_TURN.seconds} s, and none has failed"
            time.sleep(0.05)
        return reason

    def _lost(self, store: distributed.Store | None = None) -> str | None:
        """A rank's own error counts before a death without one, and both before what the loss of another brought on."""
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
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"tensor parallel: rank {rank} {how}"
        # The rank that brought them on may not be seen to have ended yet.
        if errors and all(rank in errors or code is not None for rank, code in ended.items()):
            rank, error = next(iter(errors.items()))
            return f"tensor parallel: rank {rank} failed:\n{error['text']}"
        return None

    def _watch(self) -> None:
        """Look for lost ranks. Rank 0 hears of one by itself, or when it next asks something of them. But it may wait
        for an accelerator, whose collective never returns; then nothing is left but to end the process."""
        own = self._address.connect()
        while not self._is_closed and self._failure is None:
            lost = self._lost(own)
            if not self._is_closed:
                self._failure = lost
            time.sleep(0.2)
        deadline = time.monotonic() + _STUCK
        while not self._is_closed and (self._is_busy or self.device != HOST):
            if time.monotonic() > deadline:
                print(f"whorl: {self._failure}", file=sys.stderr, flush=True)
                self._kill()
                os._exit(1)
            time.sleep(0.2)

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


def start(place: Place, device: str, job: str, settings: dict[str, Any], *, tune: bool = True) -> RankGroup:
    """Rank 0's side. job: "module:function", which every other rank calls with its `Rank`, where it finds `settings`.

    Where torchrun started the ranks, this does not return on the others: they work, then their process ends.
    """
    if distributed.is_initialized():
        raise ValueError("tensor parallel: torch.distributed is in use in this process; one engine at a time has it")
    have = device_count(device)
    if not place.is_given and have is not None and place.size > have:
        raise ValueError(
            f"tensor parallel: {place.size} ranks were asked for; this machine has {have} {device} devices"
        )
    if tune and (chosen := tune_collectives(device)) and place.rank == 0:
        log.warning("tensor parallel: set %s", " ".join(f"{name}={value}" for name, value in chosen.items()))
    if place.is_given and place.rank > 0:
        _work(place, Address.given(place.rank), job, device)
    if place.is_given:
        crew = RankGroup(place, device, Address.given(0))
        if crew.has("settings"):
            raise ValueError("tensor parallel: torchrun's ranks serve one engine, and there has been one")
    else:
        address = Address.open()
        processes = [_spawn(rank, place.size, address, job, device) for rank in range(1, place.size)]
        crew = RankGroup(place, device, address, processes)
    crew.put("settings", settings)
    return crew


def _spawn(rank: int, size: int, address: Address, job: str, device: str) -> "subprocess.Popen[bytes]":
    """A new interpreter and not a fork, so that it neither shares this one's threads nor runs its main module."""
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
        environment.setdefault("OMP_NUM_THREADS", str(_threads(size)))
    # The pipe carries nothing: it closes when rank 0 ends, however it ends.
    return subprocess.Popen([*COMMAND, job, device], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)


def _threads(size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // size if hasattr(os, "sched_getaffinity") else 1)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Ranks of one machine connect where nobody else can."""
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
    """Whoever has a handler of his own has thought of this."""
    asked = threading.Event()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- the other ranks


def follow() -> NoReturn:
    """The main function of a rank that rank 0 has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; rank 0 decides what it means
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    rank = int(os.environ["RANK"])
    place = Place(rank=rank, size=int(os.environ["WORLD_SIZE"]), local_rank=rank, is_given=False)
    _work(place, Address.given(rank), *sys.argv[1:3])


def _end_with_rank_0() -> NoReturn:
    sys.stdin.buffer.read()
    os._exit(1)


def _work(place: Place, address: Address, job: str, device: str) -> NoReturn:
    store = address.connect()
    try:
        member = Rank(place, device, store)
        module, _, name = job.partition(":")
        getattr(importlib.import_module(module), name)(member)
        member.leave()
    except BaseException as error:
        text = traceback.format_exc()
        with contextlib.suppress(RuntimeError):
            store.set(f"error/{place.rank}", json.dumps({"text": text, "is_echo": _is_echo(error)}))
        if place.is_given:
            print(f"whorl: rank {place.rank} failed:\n{text}", file=sys.stderr, flush=True)
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    """At once: interpreters that hold broken process groups may hang in their own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_echo(error: BaseException) -> bool:
    """Whether a collective raised it: then another rank is the one that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and bool(frames) and "distributed" in Path(frames[-1].filename).parts
