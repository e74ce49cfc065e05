"""Blocks and snapshots beyond the device, on one rank: copies in host memory, and files.

`offload.py` decides, on rank 0, what lies where. Here it is carried: between device and host in the stream of the
steps, so that the order of the moves is the order of the work, and between host and files by threads. A thread first
waits for the work that was launched before its move, and no step waits for a thread.

A slot of host memory has the bytes of one block in all layers, one after the other; a snapshot takes several slots.
"""

import contextlib
import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from whorl.device import HOST, accelerator, host_buffer, lasting
from whorl.host_memory import free_memory, is_of_memory
from whorl.nn import States, Vocabulary
from whorl.nn.cache import zeros
from whorl.streams import event

from .sleep import tensors_in

_ALIGNMENT = 128  # bytes
_SEGMENT = 1 << 30  # bytes of host memory that are allocated at once: torch pins powers of two
_STAGE = 1 << 28  # bytes on the device through which blocks come and go
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8
_COLUMNS = 1024  # words of a row in `check_sums`
_MAGIC = b"whorl kv 1\n"
_HEADER = len(_MAGIC) + 32 + 32  # then the digests of the name and of the content
log = logging.getLogger(__name__)


class Carry(NamedTuple):
    """A copy of blocks, or of one snapshot, between the device and slots of host memory."""

    kind: Literal["block", "snapshot"]
    items: list[int]
    slots: list[int]
    is_spilled: bool  # from the device to the host


class FileMove(NamedTuple):
    """What a thread does with a file. slots, num_bytes: of its content. ticket: names the result."""

    action: Literal["write", "read", "delete"]
    name: str
    slots: list[int]
    num_bytes: int
    ticket: int


def check_sums(x: Tensor) -> bytes:
    """Return a digest of a tensor's bytes, at the speed of memory on any device: hashed are the sums of rows and of
    columns of 64-bit words, which differ after any change that is not made to deceive."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # torch views no words that begin elsewhere
    words = flat[: len(flat) // (8 * _COLUMNS) * 8 * _COLUMNS].view(torch.int64).view(-1, _COLUMNS)
    sha = hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode())
    for part in (words.sum(0), words.sum(1), flat[words.nbytes :]):
        sha.update(part.cpu().numpy().tobytes())
    return sha.digest()


def weights_digest(model: Any) -> bytes:
    """Return a digest of the names and values of all weights."""
    sha = hashlib.sha256()
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    for name, x in model.state_dict().items() if modules else ():
        module = modules.get(name.rpartition(".")[0])
        if isinstance(module, Vocabulary) and len(x) == module.shape[0]:
            x = x[: module.stop - module.start]  # rows after these are padding, with any values
        sha.update(name.encode() + check_sums(x))
    return sha.digest()


class HostBlocks:
    """Host memory for blocks of the caches and for snapshots, and the files of one rank.

    num_bytes: most bytes of host memory. folder: of the files; None: none. rank: names this rank's files.
    """

    def __init__(
        self,
        caches: Iterable[Any],
        states: States | None,
        *,
        num_bytes: int,
        num_blocks: int,
        device: str,
        folder: str | None = None,
        rank: int = 0,
    ) -> None:
        self._device, self._states = device, states
        self._is_staged = accelerator(device) is not None
        self._tensors = list(tensors_in([cache for cache in caches if not isinstance(cache, dict)]))
        if wrong := next((x for x in self._tensors if x.shape[0] != num_blocks or not x.is_contiguous()), None):
            raise ValueError(
                f"kv_offload: a cache of this model has a tensor {list(wrong.shape)}, expected {num_blocks} blocks "
                "first; leave kv_offload_memory and kv_offload_dir out"
            )
        sizes = [x[0].nbytes for x in self._tensors]
        ends = list(itertools.accumulate((size + -size % 8 for size in sizes), initial=0))
        self._pieces = list(zip(self._tensors, ends, sizes, strict=False))
        self.snapshot_bytes = 0 if states is None else states.snapshot_bytes
        used = ends[-1] or self.snapshot_bytes
        self.slot_bytes = max(_ALIGNMENT, used + -used % _ALIGNMENT)
        self._per_segment = max(1, _SEGMENT // self.slot_bytes)
        self._segments = list(self._allocate(num_bytes // self.slot_bytes))
        self.num_slots = sum(map(len, self._segments))
        count = max(1, min(_STAGE // self.slot_bytes, self.num_slots))
        self._stage = torch.empty(count, self.slot_bytes, dtype=torch.uint8, device=device) if self._is_staged else None
        self.files = None if folder is None else BlockFiles(Path(folder), rank, self._device)

    def _allocate(self, count: int) -> Iterator[Tensor]:
        """Yield segments of `count` slots; fewer if memory runs out, which is said."""
        while count > 0:
            size = min(count, self._per_segment)
            free = free_memory()
            is_gone = free is not None and self._is_staged and free < 2 * size * self.slot_bytes
            try:
                if is_gone:
                    raise MemoryError(f"{free} bytes are free")
                if self._is_staged:
                    yield host_buffer(size * self.slot_bytes, self._device).view(size, self.slot_bytes)
                else:
                    yield zeros((size, self.slot_bytes), torch.uint8, HOST)  # takes memory when it is written
            except (MemoryError, OSError, RuntimeError) as error:
                if not is_of_memory(error):
                    raise
                log.warning(
                    "kv_offload_memory: host memory ran out (%s); the cache goes on with %d slots of %d bytes fewer",
                    *(str(error).splitlines()[0], count, self.slot_bytes),
                )
                return
            count -= size

    def row(self, slot: int) -> Tensor:
        """Return the bytes of a slot."""
        return self._segments[slot // self._per_segment][slot % self._per_segment]

    @torch.inference_mode()
    def do(self, move: Carry | FileMove) -> None:
        """Launch a copy, or give a file to a thread."""
        if isinstance(move, FileMove):
            assert self.files is not None, "files need a folder"
            parts = [self.row(slot).numpy() for slot in move.slots]
            # Of this rank: others may have more heads or fewer.
            num_bytes = self.snapshot_bytes if move.name.endswith("s") else self.slot_bytes
            self.files.do(move._replace(num_bytes=num_bytes), parts)
            return
        if self.files is not None and move.is_spilled:
            self.files.finish_slots(move.slots)
        if move.kind == "snapshot":
            self._carry_snapshot(move)
        else:
            self._carry_blocks(move)

    def _carry_snapshot(self, move: Carry) -> None:
        assert self._states is not None
        snapshot = self._states.snapshot(move.items[0])
        for slot, part in zip(move.slots, snapshot.split(self.slot_bytes), strict=True):
            row = self.row(slot)[: len(part)]
            (row if move.is_spilled else part).copy_(part if move.is_spilled else row, non_blocking=True)

    def _carry_blocks(self, move: Carry) -> None:
        """Copy blocks; through the stage, if the device has memory of its own, in few and large copies."""
        pairs = list(zip(move.slots, move.items, strict=True))
        if self._stage is None:
            for run in self._runs(pairs):
                self._exchange(self._rows(run), [block for _, block in run], is_spilled=move.is_spilled)
            return
        for first in range(0, len(pairs), len(self._stage)):
            part = pairs[first : first + len(self._stage)]
            stage, blocks = self._stage[: len(part)], [block for _, block in part]
            if move.is_spilled:
                self._exchange(stage, blocks, is_spilled=True)
            at = 0
            for run in self._runs(part):
                rows, staged = self._rows(run), stage[at : at + len(run)]
                (rows if move.is_spilled else staged).copy_(staged if move.is_spilled else rows, non_blocking=True)
                at += len(run)
            if not move.is_spilled:
                self._exchange(stage, blocks, is_spilled=False)

    def _runs(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        """Yield the pairs in runs of adjacent slots of one segment."""
        first = 0
        for i in range(1, len(pairs) + 1):
            if i == len(pairs) or pairs[i][0] != pairs[i - 1][0] + 1 or pairs[i][0] % self._per_segment == 0:
                yield pairs[first:i]
                first = i

    def _rows(self, run: Sequence[tuple[int, int]]) -> Tensor:
        segment, first = divmod(run[0][0], self._per_segment)
        return self._segments[segment][first : first + len(run)]

    def _exchange(self, rows: Tensor, blocks: list[int], *, is_spilled: bool) -> None:
        """Copy between rows [N, slot_bytes] and blocks of all layers, on one device."""
        is_run = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        index = None if is_run else lasting(torch.tensor(blocks), self._device).to(rows.device, non_blocking=True)
        for tensor, first, size in self._pieces:
            word = next(dtype for dtype in _WORDS if not size % dtype.itemsize)
            cache, part = tensor.view(len(tensor), -1).view(word), rows[:, first : first + size].view(word)
            if index is None:
                cache = cache[blocks[0] : blocks[0] + len(blocks)]
                (part if is_spilled else cache).copy_(cache if is_spilled else part)
            elif is_spilled:
                part.copy_(cache.index_select(0, index))
            else:
                cache.index_copy_(0, index, part)

    def close(self) -> None:
        if self.files is not None:
            self.files.close()


class BlockFiles:
    """A folder of files, each with one block or snapshot of this rank: `NAME.RANK`.

    A file is whole or not there: it is written beside its place and then takes its name. Its header has the digests of
    its name and of its content, so what was cut, changed or renamed is not read, and that is said once.
    """

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self.folder, self._rank, self._device = folder, rank, device
        # A read is waited for, so it does not queue behind writes.
        self._writer, self._reader = (ThreadPoolExecutor(n, thread_name_prefix="whorl-kv") for n in (1, 2))
        self._results: dict[int, Future[bool]] = {}
        self._by_slot: dict[int, Future[bool]] = {}  # the last that reads a slot's memory, or writes to it
        self._said: set[str] = set()
        self.num_failed = 0

    def do(self, move: FileMove, parts: list[Any]) -> None:
        """Give a move to a thread. parts: the memory of its slots, as bytes."""
        ready = event(self._device) if move.slots else None
        pool = self._reader if move.action == "read" else self._writer
        views, left = [], move.num_bytes
        for part in parts:
            views.append(memoryview(part)[: min(left, len(part))])
            left -= len(views[-1])
        # Rank 0 counts memory as free when its own write is done; this rank may still have to write what was there.
        before = {self._by_slot[slot] for slot in move.slots if slot in self._by_slot} if move.action == "read" else ()
        future = pool.submit(self._run, move, views, ready, before)
        if move.action == "read" or (move.action == "write" and self._rank == 0):  # the others nobody asks for
            self._results[move.ticket] = future
        self._by_slot |= dict.fromkeys(move.slots, future)

    def finish_slots(self, slots: Iterable[int]) -> None:
        """Wait for the threads that use these slots, which are about to be overwritten."""
        for slot in slots:
            if (future := self._by_slot.pop(slot, None)) is not None:
                future.result()

    def result(self, ticket: int, *, wait: bool = False) -> bool | None:
        """Return whether a move has succeeded; None while it is not done. A result can be taken once."""
        future = self._results.get(ticket)
        if future is None:  # its move was never made: the step before it failed
            return False
        if not wait and not future.done():
            return None
        return self._results.pop(ticket).result()

    def _run(
        self,
        move: FileMove,
        parts: list[memoryview],
        ready: Callable[[], None] | None,
        before: Iterable[Future[bool]] = (),
    ) -> bool:
        try:
            for future in before:
                future.result()
            if ready is not None:
                ready()
            {"write": self._write, "read": self._read, "delete": self._delete}[move.action](move, parts)
        except FileNotFoundError:  # another process has made room
            return False
        except (OSError, ValueError) as error:
            self.num_failed += 1
            kind = "disk" if isinstance(error, OSError) else "content"
            if kind not in self._said:
                self._said.add(kind)
                after = "computed again instead" if move.action == "read" else "not kept on disk"
                log.warning("kv_offload_dir: %s; what a file cannot hold is %s. This is said once", error, after)
            if move.action == "read":
                with contextlib.suppress(OSError):
                    self._path(move.name).unlink()
            return False
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.{self._rank}"

    def _write(self, move: FileMove, parts: list[memoryview]) -> None:
        path = self._path(move.name)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb", buffering=0) as file:
                for part in (memoryview(_header(move.name, parts)), *parts):
                    written = 0
                    while written < len(part):
                        written += file.write(part[written:])
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _read(self, move: FileMove, parts: list[memoryview]) -> None:
        path = self._path(move.name)
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER)
            for part in parts:
                if file.readinto(part) != len(part):
                    raise ValueError(f"{path}: it is too short")
            if file.read(1) or header != _header(move.name, parts):
                raise ValueError(f"{path}: it is not what was written under this name")
        os.utime(path)  # what is used last goes last

    def _delete(self, move: FileMove, parts: list[memoryview]) -> None:
        """Remove this rank's file, and those after it: an engine of more ranks may have left them."""
        self._path(move.name).unlink(missing_ok=True)
        for rank in itertools.count(self._rank + 1):
            self._path(move.name).with_suffix(f".{rank}").unlink()  # FileNotFoundError ends it

    def close(self) -> None:
        """Write what is left, and end the threads."""
        self._writer.shutdown()
        self._reader.shutdown(cancel_futures=True)


def _header(name: str, parts: list[memoryview]) -> bytes:
    sums = hashlib.sha256(b"".join(check_sums(torch.frombuffer(part, dtype=torch.uint8)) for part in parts))
    return _MAGIC + hashlib.sha256(name.encode()).digest() + sums.digest()


def num_slots(num_bytes: int, slot_bytes: int) -> int:
    """Return how many slots hold so many bytes."""
    return math.ceil(num_bytes / slot_bytes)
