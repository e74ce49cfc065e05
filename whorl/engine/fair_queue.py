"""A queue that clients share fairly: it says whose turn it is, not only who came first.

The next turn is that of a client of which nothing runs, else of the client that has been served least since it began to
wait (the virtual token counter of Sheng et al., OSDI 2024). A client cannot save up turns: when it begins to wait, it
counts as served as much as the client that was served least of those that wait, or most of those that run if none does.
With one client, the order is that of arrival.

Items of one client are ordered by priority, lower numbers first, then by arrival. A client must not get ahead of others
by its own numbers, so between clients a number below 0 counts as 0; one above 0 yields to all items with a lower one.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

Client = str | None
_FEW = 256  # clients that are remembered without a look at which of them can be forgotten


class Waiter(Protocol):
    @property
    def client(self) -> Client: ...
    @property
    def priority(self) -> int: ...


_T = TypeVar("_T", bound=Waiter)


class FairQueue(Generic[_T]):
    """Items that wait, and how many run and how much has been done for each client. Iterates over the items."""

    def __init__(self) -> None:
        self.lines: dict[Client, deque[_T]] = {}  # what waits, by client; none is empty
        self.running: Counter[Client] = Counter()  # how many items of each client run; none is 0
        self._served: dict[Client, float] = {}
        self._many = _FEW

    def __len__(self) -> int:
        return sum(len(line) for line in tuple(self.lines.values()))

    def __iter__(self) -> Iterator[_T]:
        return (item for line in tuple(self.lines.values()) for item in tuple(line))

    def add(self, item: _T, *, first: bool = False) -> None:
        """Queue an item behind those of its client and priority; first: before them."""
        if (line := self.lines.get(item.client)) is None:
            self._join(item.client)
            line = self.lines[item.client] = deque()
        if first:
            index = next((i for i, other in enumerate(line) if other.priority >= item.priority), len(line))
        else:
            index = len(line)
            while index and line[index - 1].priority > item.priority:
                index -= 1
        line.insert(index, item)

    def remove(self, item: _T) -> None:
        """Take an item that waits out of the queue."""
        line = self.lines[item.client]
        line.remove(item)
        if not line:
            del self.lines[item.client]

    def start(self, item: _T) -> None:
        """Take an item out of the queue to run it."""
        self.remove(item)
        self.running[item.client] += 1

    def stop(self, item: _T) -> None:
        """Note that an item does not run any more."""
        self.running[item.client] -= 1
        if not self.running[item.client]:
            del self.running[item.client]

    def charge(self, client: Client, cost: float) -> None:
        """Note that so much has been done for a client, in any unit."""
        self._served[client] = self._served.get(client, 0.0) + cost

    def turn(self, item: _T) -> tuple[int, bool, float]:
        """Return the key by which an item's turn comes: the smallest is next, and among equal ones the oldest."""
        return level(item), self.running[item.client] > 0, self._served.get(item.client, 0.0)

    def next(self, *, most: float = math.inf) -> _T | None:
        """Return the item whose turn is next; None if none waits. most: how many items of one client may run."""
        heads = (line[0] for client, line in self.lines.items() if self.running[client] < most)
        return min(heads, key=self.turn, default=None)

    def _join(self, client: Client) -> None:
        """Let a client begin to wait; forget clients that would begin as if they were new."""
        served = self._served
        if not self.lines and not self.running:
            served.clear()
        most = max((served.get(other, 0.0) for other in self.running), default=0.0)
        least = min((served.get(other, 0.0) for other in self.lines), default=most)
        if len(served) > self._many:
            served = {c: cost for c, cost in served.items() if cost > least or c in self.lines or c in self.running}
            self._served, self._many = served, max(_FEW, 2 * len(served))
        served[client] = max(served.get(client, 0.0), least)


def level(item: Waiter) -> int:
    """Return an item's priority as it counts between clients."""
    return max(item.priority, 0)


def has_room(waiting: Mapping[Client, int], client: Client, count: int, most: int) -> bool:
    """Return whether `count` more items of a client may wait where `most` may.

    waiting: how many items of each client wait. A client may always have its equal part of `most`, even if others have
    filled the queue.
    """
    return sum(waiting.values()) + count <= most or waiting.get(client, 0) + count <= most // len({client, *waiting})
