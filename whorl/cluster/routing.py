"""Which replica a request goes to: the one that has least to do before it, what it would have to read of the prompt
included. No Ray here: whoever routes tells this of replicas and requests, and asks it.

    cost of a replica = blocks of the prompt that it has not seen lately
                      + for each request there: `request_cost`, and until its first token the blocks it had to read

So a request follows its prompt's beginning until the queue there is longer than reading it anew elsewhere. Costs that
are equal go to the replica that holds least, then by name: the same history gives the same choices.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

STALE_SECONDS = 600.0
REQUEST_COST = 4.0
HELD_BLOCKS = 65536


@dataclass(slots=True)
class _Request:
    blocks: int
    blocks_seen: int
    has_begun: bool = False

    @property
    def blocks_to_read(self) -> int:
        return 0 if self.has_begun else self.blocks - self.blocks_seen


@dataclass(slots=True)
class _Replica:
    """seen: digests of blocks and when they were last asked for, the longest ago first. requests: by number."""

    seen: "OrderedDict[bytes, float]" = field(default_factory=OrderedDict)
    requests: dict[str, _Request] = field(default_factory=dict)

    def load(self, request_cost: float) -> float:
        return sum(request_cost + each.blocks_to_read for each in self.requests.values())


@dataclass(frozen=True, slots=True)
class Counts:
    """Of requests whose answer began: the blocks of their prompts, and those of them that their replica had seen."""

    requests: int = 0
    blocks: int = 0
    blocks_seen: int = 0


class Routing:
    """May be told and asked from any thread.

    request_cost: of a request in progress to those that come, in blocks. held_blocks: that a replica's cache has room
    for; stale_seconds: how long a block that nobody asks for is taken to be there. in_turn: each replica after the
    other, whatever it holds.
    """

    def __init__(
        self,
        *,
        request_cost: float = REQUEST_COST,
        held_blocks: int = HELD_BLOCKS,
        stale_seconds: float = STALE_SECONDS,
        in_turn: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_cost, self.held_blocks, self.stale_seconds = request_cost, held_blocks, stale_seconds
        self.in_turn, self._clock = in_turn, clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._where: dict[str, str] = {}
        self._num_turns = 0
        self.counts = Counts()

    def keep(self, names: Iterable[str]) -> None:
        """Those that are alive. One that is new has seen nothing; what a lost one held is forgotten."""
        with self._lock:
            before, self._replicas = self._replicas, {}
            for name in sorted(set(names)):
                self._replicas[name] = before.get(name) or _Replica()
            self._where = {number: name for number, name in self._where.items() if name in self._replicas}

    def order(self, blocks: Sequence[bytes]) -> list[str]:
        """The replicas, best first."""
        with self._lock:
            if not self.in_turn:
                return sorted(self._replicas, key=lambda name: self._cost(name, blocks))
            names = list(self._replicas)
            first = self._num_turns % len(names) if names else 0
            self._num_turns += 1
            return names[first:] + names[:first]

    def sent(self, number: str, name: str, blocks: Sequence[bytes]) -> None:
        """The request is there now; said again of another replica, it has moved."""
        with self._lock:
            if self._where.get(number) == name:
                return
            self._take(number)
            replica = self._replicas.get(name)
            if replica is None:
                return
            self._where[number] = name
            replica.requests[number] = _Request(len(blocks), self._num_seen(replica, blocks))
            now = self._clock()
            for block in blocks:
                replica.seen[block] = now
                replica.seen.move_to_end(block)
            while len(replica.seen) > self.held_blocks:
                replica.seen.popitem(last=False)

    def begun(self, number: str) -> None:
        """Its first token is there: its prompt has been read."""
        with self._lock:
            name = self._where.get(number)
            request = None if name is None else self._replicas[name].requests[number]
            if request is None or request.has_begun:
                return
            request.has_begun = True
            old = self.counts
            blocks, seen = old.blocks + request.blocks, old.blocks_seen + request.blocks_seen
            self.counts = Counts(old.requests + 1, blocks, seen)

    def ended(self, number: str) -> None:
        with self._lock:
            self._take(number)

    def where(self, number: str) -> str | None:
        """The replica that has a request in progress."""
        with self._lock:
            return self._where.get(number)

    def num_running(self) -> dict[str, int]:
        """By replica."""
        with self._lock:
            return {name: len(replica.requests) for name, replica in self._replicas.items()}

    def _take(self, number: str) -> None:
        name = self._where.pop(number, None)
        if name is not None:
            self._replicas[name].requests.pop(number, None)

    def _cost(self, name: str, blocks: Sequence[bytes]) -> tuple[float, int, str]:
        replica = self._replicas[name]
        missing = len(blocks) - self._num_seen(replica, blocks)
        return missing + replica.load(self.request_cost), len(replica.seen), name

    def _num_seen(self, replica: _Replica, blocks: Sequence[bytes]) -> int:
        """From the beginning: a block behind one that is gone cannot be used."""
        oldest = self._clock() - self.stale_seconds
        for at, block in enumerate(blocks):
            if replica.seen.get(block, float("-inf")) < oldest:
                return at
        return len(blocks)


_SHARED: dict[str, Routing] = {}


def share(name: str, routing: Routing) -> None:
    """Who routes in this process finds it by its name. The endpoint tells it what Ray does not: when an answer begins
    and when it is over."""
    _SHARED[name] = routing


def shared(name: str) -> Routing:
    return _SHARED.setdefault(name, Routing())
