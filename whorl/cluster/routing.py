"""The routing policy: a request goes to the replica with the least work, including the prefill of its prompt there.

This module does not use Ray. The router reports replicas and requests to it and asks it for the order of replicas.

    cost of a replica = blocks of the prompt that it has not seen recently
                      + for each of its requests: `request_cost`, and until its first token the blocks to prefill

So a request goes where its prefix is cached until the queue there costs more than a prefill elsewhere. Ties go to the
replica with the fewest cached blocks, then by name, so that the same history gives the same choices.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

# Defaults of `Routing`.
STALE_SECONDS = 600.0
REQUEST_COST = 4.0
HELD_BLOCKS = 65536


@dataclass(slots=True)
class _Request:
    """A request in progress. blocks: of its prompt; blocks_seen: those that its replica had seen before."""

    blocks: int
    blocks_seen: int
    has_begun: bool = False

    @property
    def blocks_to_prefill(self) -> int:
        return 0 if self.has_begun else self.blocks - self.blocks_seen


@dataclass(slots=True)
class _Replica:
    """A live replica. seen: when each digest was last used, the oldest first. requests: by attempt id."""

    seen: "OrderedDict[bytes, float]" = field(default_factory=OrderedDict)
    requests: dict[str, _Request] = field(default_factory=dict)

    def load(self, request_cost: float) -> float:
        return sum(request_cost + request.blocks_to_prefill for request in self.requests.values())


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of requests whose answer began: prompt blocks, and those of them that their replica had seen."""

    requests: int = 0
    blocks: int = 0
    blocks_seen: int = 0


class Routing:
    """The routing policy and its state. Thread-safe.

    request_cost: the cost of a request in progress, in blocks. held_blocks: how many blocks a replica's cache has room
    for. stale_seconds: after this time without use a block is assumed to be evicted. in_turn: round robin instead.
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
        self._where: dict[str, str] = {}  # the replica of each request in progress, by attempt id
        self._num_turns = 0
        self.counts = Counts()

    def set_replicas(self, names: Iterable[str]) -> None:
        """Set the live replicas. A new one starts without blocks; the state of one that is gone is forgotten."""
        with self._lock:
            previous, self._replicas = self._replicas, {}
            for name in sorted(set(names)):
                self._replicas[name] = previous.get(name) or _Replica()
            self._where = {attempt: name for attempt, name in self._where.items() if name in self._replicas}

    def order(self, blocks: Sequence[bytes]) -> list[str]:
        """Return the replicas for a prompt, best first."""
        with self._lock:
            if not self.in_turn:
                return sorted(self._replicas, key=lambda name: self._cost(name, blocks))
            names = list(self._replicas)
            first = self._num_turns % len(names) if names else 0
            self._num_turns += 1
            return names[first:] + names[:first]

    def assign(self, attempt_id: str, name: str, blocks: Sequence[bytes]) -> None:
        """Record that a request goes to this replica; a second call with another replica moves it."""
        with self._lock:
            if self._where.get(attempt_id) == name:
                return
            self._remove(attempt_id)
            replica = self._replicas.get(name)
            if replica is None:
                return
            self._where[attempt_id] = name
            replica.requests[attempt_id] = _Request(len(blocks), self._num_seen(replica, blocks))
            now = self._clock()
            for block in blocks:
                replica.seen[block] = now
                replica.seen.move_to_end(block)
            while len(replica.seen) > self.held_blocks:
                replica.seen.popitem(last=False)

    def mark_begun(self, attempt_id: str) -> None:
        """Record the first token of a request: its prompt is prefilled."""
        with self._lock:
            name = self._where.get(attempt_id)
            request = None if name is None else self._replicas[name].requests[attempt_id]
            if request is None or request.has_begun:
                return
            request.has_begun = True
            counts = self.counts
            blocks, seen = counts.blocks + request.blocks, counts.blocks_seen + request.blocks_seen
            self.counts = Counts(counts.requests + 1, blocks, seen)

    def finish(self, attempt_id: str) -> None:
        """Record the end of a request."""
        with self._lock:
            self._remove(attempt_id)

    def replica_of(self, attempt_id: str) -> str | None:
        """Return the replica of a request in progress."""
        with self._lock:
            return self._where.get(attempt_id)

    def num_running(self) -> dict[str, int]:
        """Return the number of requests in progress of each replica."""
        with self._lock:
            return {name: len(replica.requests) for name, replica in self._replicas.items()}

    def _remove(self, attempt_id: str) -> None:
        """Forget a request, but not the blocks that its replica has seen."""
        name = self._where.pop(attempt_id, None)
        if name is not None:
            self._replicas[name].requests.pop(attempt_id, None)

    def _cost(self, name: str, blocks: Sequence[bytes]) -> tuple[float, int, str]:
        """Return the sort key of a replica for a prompt: its cost, then what breaks ties (see the top of the file)."""
        replica = self._replicas[name]
        missing = len(blocks) - self._num_seen(replica, blocks)
        return missing + replica.load(self.request_cost), len(replica.seen), name

    def _num_seen(self, replica: _Replica, blocks: Sequence[bytes]) -> int:
        """Count the leading blocks that the replica has: a block after a missing one cannot be reused."""
        oldest = self._clock() - self.stale_seconds
        for index, block in enumerate(blocks):
            if replica.seen.get(block, float("-inf")) < oldest:
                return index
        return len(blocks)


_SHARED: dict[str, Routing] = {}


def share(name: str, routing: Routing) -> None:
    """Register a policy under a name, so that the router in this process finds it.

    The endpoint tells the same object what Ray does not tell the router: when an answer begins and when it is over.
    """
    _SHARED[name] = routing


def shared(name: str) -> Routing:
    """Return the policy that was registered under a name, or a new one."""
    return _SHARED.setdefault(name, Routing())
