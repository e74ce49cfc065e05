"""Which blocks and snapshots lie beyond the device, in host memory and in files: decided here, carried by HostBlocks.

A block of a prefix is copied to host memory when its sequence ends or is preempted, and from there to a file. A prompt
whose prefix goes on beyond the device takes new blocks for it, which are fetched before its first chunk. Steps with
decoding sequences carry only some bytes each, so that these do not wait. What files have is read while a request waits.

A prefix is named by a digest of its tokens, their contents and its origin, so the name is the same in other processes.
"""

import hashlib
import itertools
import logging
import re
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from whorl.files import is_partial
from whorl.host_memory import free_memory

from .host_blocks import Carry, FileMove, num_slots
from .sequence import Sequence
from .states import Move

_STEP_BYTES = 1 << 28  # carried in a step with decoding sequences
_ANY = 1 << 60
_RESERVE = 1 << 28  # bytes of a CPU's memory that stay free
_CHECKED = 1 << 26  # bytes of fresh host memory between two looks at what is free
_ABANDONED = 3600  # seconds after which nobody writes to a file any more
_NAME = re.compile(r"([0-9a-f]{32}/[0-9a-f]{32}s?)\.(\d+)")
log = logging.getLogger(__name__)
Moves = list[Move | Carry | FileMove]


class Ranks(Protocol):
    """The runner of all ranks."""

    def results(self, tickets: list[int], *, wait: bool = False, is_shared: bool = False) -> dict[int, bool]:
        """Return the results of moves of files that are done. is_shared: on all ranks, which answer together."""


@dataclass(slots=True, eq=False)
class _Item:
    """Something in host memory. num_uses: moves of its slots that are not done; until then they are not given away.
    is_here: it is not still being read from a file."""

    slots: list[int]
    num_uses: int = 0
    is_here: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """slots: of host memory on every rank; slot, snapshot: bytes on rank 0; disk: most bytes of all ranks' files, 0
    without files; ranks: their number."""

    slots: int
    slot: int
    snapshot: int
    disk: int = 0
    ranks: int = 1


class Offload:
    """The tables of host memory and of files. All names of blocks are digests; those of snapshots end with "s".

    moves: what the device does before the next call, in order; other parts append to it, too. identify: returns what
    all blocks depend on, the weights included. folder: of files. checks_memory: host memory is taken when it is
    written.
    """

    def __init__(
        self,
        ranks: Ranks,
        moves: Moves,
        sizes: Sizes,
        *,
        identify: Callable[[], bytes],
        folder: str | None,
        checks_memory: bool,
    ) -> None:
        self._ranks, self._moves, self.sizes, self.folder = ranks, moves, sizes, folder
        self._identify = identify
        self._checks_memory, self._next_check = checks_memory, 0
        self._free, self._num_fresh = list[int](), 0  # slots that were used, and how many were
        self.num_slots = sizes.slots
        self._items: OrderedDict[str, _Item] = OrderedDict()  # least recently used first
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes on all ranks, by name
        self._tickets = itertools.count()
        self._writing: dict[int, tuple[str, str, _Item]] = {}
        self._reading: dict[int, tuple[str, str, _Item]] = {}
        self._due: OrderedDict[int, str] = OrderedDict()  # blocks that are still to be copied to the host
        self._coming: deque[tuple[int, _Item]] = deque()  # blocks to be fetched
        self._awaited: set[int] = set()  # the same blocks
        self._num_launched = 0  # the first ticket whose move no rank has yet
        self._identity: bytes | None = None
        self._folder_name = ""
        self._room = 0  # bytes that this step may still carry
        self.num_disk_bytes = self.num_spilled = self.num_fetched = self.num_read = self.num_failed = 0
        if folder is not None:
            self._scan(Path(folder))
            _ = self.identity  # now, not when the first request comes

    # ---- names

    @property
    def identity(self) -> bytes:
        """What all of this engine's blocks depend on, the weights included; another one after they have changed."""
        if self._identity is None:
            self._identity = self._identify()
            self._folder_name = hashlib.sha256(self._identity).hexdigest()[:32]
        return self._identity

    def name(self, parent: str | None, origin: object, tokens: tuple[int, ...], parts: object) -> str:
        """Return the name of a prefix from that of the prefix before its last block, or from its origin."""
        sha = hashlib.sha256(self.identity + repr(origin).encode() if parent is None else bytes.fromhex(parent))
        sha.update(array("q", tokens).tobytes() + repr(parts).encode())
        return sha.hexdigest()[:32]

    def _path(self, name: str) -> str:
        assert self.identity
        return f"{self._folder_name}/{name}"

    # ---- from the device

    def spill(self, blocks: Iterable[tuple[int, str]]) -> None:
        """Note blocks of a prefix, first block first, that are to be copied to the host unless they have been."""
        for block, name in reversed(list(blocks)):
            if name in self._items:
                self._items.move_to_end(name)
            else:
                self._due[block] = name

    def spill_snapshot(self, snapshot: int, name: str) -> None:
        """Copy a snapshot to the host, unless it is there."""
        if name in self._items:
            self._items.move_to_end(name)
        elif (item := self._add(name, num_slots(self.sizes.snapshot, self.sizes.slot))) is not None:
            self._moves.append(Carry("snapshot", [snapshot], item.slots, is_spilled=True))
            self._write(name, item, self.sizes.snapshot)

    def taken(self, blocks: Iterable[int]) -> None:
        """Note that blocks get other content: what is due is copied now, what is awaited no longer is."""
        if not self._due and not self._awaited:
            return
        for block in blocks:
            if (name := self._due.pop(block, None)) is not None:
                self._issue_spill([(block, name)])
            if block in self._awaited:
                self._awaited.remove(block)
                entry = next(entry for entry in self._coming if entry[0] == block)
                entry[1].num_uses -= 1
                self._coming.remove(entry)

    # ---- to the device

    def reach(self, names: list[str], first: int, *, with_files: bool = False, has_state: Callable[[int], bool]) -> int:
        """Return how far the prefix with these names goes on beyond the device, in blocks, from block `first` on.

        with_files: count what files have. has_state: whether the device has the state after so many blocks.
        """
        end = first
        while end < len(names) and self._has(names[end], with_files=with_files):
            end += 1
        if self.sizes.snapshot:
            counts = range(end, 0, -1)
            is_start = (n for n in counts if has_state(n) or self._has(f"{names[n - 1]}s", with_files=with_files))
            end = max(first, next(is_start, 0))
        return end

    def hold(self, names: Iterable[str]) -> None:
        """Keep these blocks on the host until they are fetched."""
        for name in names:
            self._items[name].num_uses += 1
            self._items.move_to_end(name)

    def fetch(self, blocks: Iterable[tuple[int, str]]) -> None:
        """Copy these blocks, which are held, from the host, soon."""
        for block, name in blocks:
            self._coming.append((block, self._items[name]))
            self._awaited.add(block)
            self.num_fetched += 1
        self._issue()

    def fetch_snapshot(self, snapshot: int, name: str) -> None:
        """Copy a snapshot from the host."""
        self._items.move_to_end(name)
        self._moves.append(Carry("snapshot", [snapshot], self._items[name].slots, is_spilled=False))

    def has_snapshot(self, name: str) -> bool:
        return self._has(f"{name}s", with_files=False)

    def has_come(self, seq: Sequence) -> bool:
        """Return whether all blocks of a sequence have been fetched, in the order of the device's work."""
        return not self._awaited or self._awaited.isdisjoint(seq.block_table)

    # ---- steps

    def begin(self, *, is_decoding: bool) -> None:
        """Begin a step: carry what is due, only some of it if sequences decode."""
        self._settle_writes()
        self._room = max(_STEP_BYTES, self.sizes.slot) if is_decoding else _ANY
        self._issue()

    def _issue(self) -> None:
        """Append the moves that the step has room for, those that sequences wait for first."""
        count = min(self._room // self.sizes.slot, len(self._coming) + len(self._due))
        self._room -= count * self.sizes.slot
        coming = [self._coming.popleft() for _ in range(min(count, len(self._coming)))]
        if coming:
            slots = [item.slots[0] for _, item in coming]
            self._moves.append(Carry("block", [block for block, _ in coming], slots, is_spilled=False))
        for block, item in coming:
            item.num_uses -= 1
            self._awaited.remove(block)
        self._issue_spill([self._due.popitem(last=False) for _ in range(min(count - len(coming), len(self._due)))])

    def _issue_spill(self, blocks: list[tuple[int, str]]) -> None:
        """Copy blocks to the host, the end of a prefix first in `blocks`; neighbors get neighboring slots."""
        # By name: sequences that computed a prefix at the same time have blocks of their own for it.
        new = {name: block for block, name in reversed(blocks) if name not in self._items}
        added = list(zip(new.items(), self._take(len(new)), strict=False))
        if added:
            self._moves.append(Carry("block", [b for (_, b), _ in added], [slot for _, slot in added], is_spilled=True))
        for (name, _), slot in reversed(added):  # the end of a prefix is given up before its beginning
            self._items[name] = item = _Item([slot])
            self._write(name, item, self.sizes.slot)
        self.num_spilled += len(added)

    # ---- host memory

    def _add(self, name: str, count: int) -> _Item | None:
        """Give slots to a new item; None if too few can be given up."""
        slots = self._take(count)
        if len(slots) < count:
            self._free += slots
            return None
        self._items[name] = item = _Item(slots)
        return item

    def _take(self, count: int) -> list[int]:
        """Return free slots, in order, those of the least recently used items if necessary; fewer if too many are in
        use."""
        while len(self._free) < count and self._num_fresh < self.num_slots and self._has_memory():
            self._free.append(self._num_fresh)
            self._num_fresh += 1
        if len(self._free) < count:
            self._settle_writes()
            victims = (name for name, item in self._items.items() if not item.num_uses)
            for name in list(itertools.islice(victims, count - len(self._free))):
                self._free += self._items.pop(name).slots
        slots, self._free = self._free[:count], self._free[count:]
        return sorted(slots)

    def _has_memory(self) -> bool:
        """Return whether another slot may take memory: a CPU gives it when it is written, and then cannot refuse."""
        if not self._checks_memory or self._num_fresh < self._next_check:
            return True
        free = free_memory()
        if free is not None and free < _RESERVE + _CHECKED * self.sizes.ranks:
            log.warning(
                "kv_offload_memory: host memory ran out, %d bytes are free; the cache goes on with %d bytes of it",
                *(free, self._num_fresh * self.sizes.slot),
            )
            self.num_slots = self._num_fresh
            return False
        self._next_check = self._num_fresh + max(1, _CHECKED // self.sizes.slot)
        return True

    # ---- files

    def _has(self, name: str, *, with_files: bool) -> bool:
        item = self._items.get(name)
        if item is None:
            return with_files and self._path(name) in self._files
        return with_files or item.is_here

    def _scan(self, folder: Path) -> None:
        """Find the files of all engines. Those of writers that are gone are removed; other files are left alone."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what users have written
        except OSError as error:
            raise ValueError(f"kv_offload_dir: {folder}: {error.strerror}; give one that can be written") from error
        ages: dict[str, float] = {}
        num_foreign, example = 0, ""
        for path in folder.rglob("*"):
            match = _NAME.fullmatch(path.relative_to(folder).as_posix())
            if path.is_dir():
                continue
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process has made room, or a link leads nowhere
                continue
            if match is None:
                if not is_partial(path):
                    num_foreign, example = num_foreign + 1, path.name
                elif time.time() - stat.st_mtime > _ABANDONED:
                    path.unlink(missing_ok=True)
                continue
            ages[match[1]] = stat.st_mtime
            self._files[match[1]] = self._files.get(match[1], 0) + stat.st_size
        for name in sorted(ages, key=lambda name: ages[name]):
            self._files.move_to_end(name)
        self.num_disk_bytes = sum(self._files.values())
        if num_foreign:
            log.warning(
                "%s: %d files are not of a KV cache, such as %s; they are ignored", folder, num_foreign, example
            )
        self._make_room()

    def _write(self, name: str, item: _Item, num_bytes: int) -> None:
        """Write an item to its file, unless there is one."""
        path = self._path(name) if self.sizes.disk else ""
        if not path or path in self._files:
            if path:
                self._files.move_to_end(path)
            return
        ticket = next(self._tickets)
        item.num_uses += 1
        self._writing[ticket] = name, path, item
        self._moves.append(FileMove("write", path, item.slots, num_bytes, ticket))
        self._files[path] = num_bytes * self.sizes.ranks
        self.num_disk_bytes += self._files[path]
        self._make_room()

    def _make_room(self) -> None:
        """Remove the files that were used longest ago until the rest has room."""
        while self.num_disk_bytes > self.sizes.disk and self._files:
            path, num_bytes = self._files.popitem(last=False)
            self.num_disk_bytes -= num_bytes
            self._moves.append(FileMove("delete", path, [], 0, next(self._tickets)))

    def _launched(self, tickets: Iterable[int]) -> list[int]:
        return [ticket for ticket in tickets if ticket < self._num_launched]

    def _settle_writes(self, *, wait: bool = False) -> None:
        tickets = self._launched(self._writing)
        for ticket, is_written in self._ranks.results(tickets, wait=wait).items() if tickets else ():
            _, path, item = self._writing.pop(ticket)
            item.num_uses -= 1
            if not is_written:
                self.num_failed += 1
                self.num_disk_bytes -= self._files.pop(path, 0)

    def read_ahead(self, names: list[str], first: int, *, has_state: Callable[[int], bool]) -> set[int]:
        """Begin to read what files have of a prefix from block `first` on; return the tickets to wait for."""
        end = self.reach(names, first, with_files=True, has_state=has_state) if self._files else first
        keys = [(name, 1, self.sizes.slot) for name in names[first:end]]
        state = f"{names[end - 1]}s" if end and self.sizes.snapshot and not has_state(end) else None
        if state is not None and self._has(state, with_files=True):
            keys.insert(0, (state, num_slots(self.sizes.snapshot, self.sizes.slot), self.sizes.snapshot))
        tickets: set[int] = set()
        for name, count, num_bytes in keys:
            if (known := self._items.get(name)) is not None:
                self._items.move_to_end(name)
                if not known.is_here:
                    tickets |= {ticket for ticket, (other, *_) in self._reading.items() if other == name}
            elif self._path(name) not in self._files or (item := self._add(name, count)) is None:
                break  # a write has failed, or there is no memory; the rest is computed again
            else:
                tickets.add(ticket := next(self._tickets))
                item.num_uses, item.is_here = 1, False
                self._reading[ticket] = name, self._path(name), item
                self._files.move_to_end(self._path(name))
                self._moves.append(FileMove("read", self._path(name), item.slots, num_bytes, ticket))
        return tickets

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def settle_reads(self, *, wait: bool = False) -> None:
        """Take the results of reads; wait: of all of them."""
        tickets = self._launched(self._reading)
        for ticket, is_read in self._ranks.results(tickets, wait=wait, is_shared=True).items() if tickets else ():
            name, path, item = self._reading.pop(ticket)
            item.num_uses, item.is_here = item.num_uses - 1, True
            self.num_read += is_read
            if not is_read:
                self.num_failed += 1
                self.num_disk_bytes -= self._files.pop(path, 0)
            if not is_read and self._items.get(name) is item:
                self._free += self._items.pop(name).slots

    def is_read(self, tickets: set[int]) -> bool:
        """Return whether none of these is still being read."""
        return not tickets or self._reading.keys().isdisjoint(tickets)

    # ---- the engine

    def take(self) -> Moves:
        """Return the moves since the last call, in order; the caller gives them to all ranks."""
        moves = list(self._moves)
        self._moves.clear()
        self._num_launched = next(self._tickets)
        return moves

    def forget(self) -> None:
        """Give up everything: the weights have changed. Files keep what belongs to the old ones, under its name."""
        self.settle_reads(wait=True)
        self._settle_writes(wait=True)
        for _, path, _ in self._writing.values():  # nobody will do these
            self.num_disk_bytes -= self._files.pop(path, 0)
        deletes = [each for each in self._moves if isinstance(each, FileMove) and each.action == "delete"]
        for table in (self._writing, self._reading, self._items, self._due, self._coming, self._awaited, self._moves):
            table.clear()
        self._moves += deletes
        self._free, self._identity = list(range(self._num_fresh)), None

    def stats(self) -> dict[str, int]:
        """Return the present use of host memory and of the disk, and counters of blocks since the start."""
        return {
            "num_host_slots": self.num_slots,
            "num_host_slots_used": self._num_fresh - len(self._free),
            "num_host_bytes": (self._num_fresh - len(self._free)) * self.sizes.slot * self.sizes.ranks,
            "num_disk_bytes": self.num_disk_bytes,
            "num_blocks_spilled": self.num_spilled,
            "num_blocks_fetched": self.num_fetched,
            "num_files_read": self.num_read,
            "num_files_failed": self.num_failed,
        }

    def __str__(self) -> str:
        size = self.num_slots * self.sizes.slot * self.sizes.ranks
        line = f"KV cache beyond the device: {size / 1e9:.3g} GB of host memory for {self.num_slots} blocks"
        if self.folder is None:
            return line
        return f"{line}; {self.num_disk_bytes / 1e9:.3g} of {self.sizes.disk / 1e9:.3g} GB in {self.folder}"
