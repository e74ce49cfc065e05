"""Which pictures the tower encodes in a step, and whose features are kept.

A picture is encoded when the first of its placeholders comes into a step, once for all who show it. Its layers are
counted against the step's tokens: one whose encoding is worth more than a step has left runs a few layers, and the rest
in the next steps. So those that decode wait for at most one layer more than they would for text.

All of this is decided on the host; the runner does it and holds the tensors, by number.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from whorl.media import MediaItem

from .placing import Placed
from .sequence import Sequence

# Equal keys have equal features. The salt is the request's: who shares nothing else learns nothing here.
_Key = tuple[str | None, str, tuple[int, int, int], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Layers of the tower that a step runs for one picture. item: where they are the first, else None."""

    number: int
    layers: int
    item: MediaItem | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Of the tower in one step: what to drop before it, what to run, and the tokens that this is worth."""

    dropped: list[int]
    jobs: list[Job]
    num_tokens: int


NO_WORK = Work([], [], 0)


@dataclass(slots=True, eq=False)
class Entry:
    """Features that are kept, or on their way: `layers` of the tower have run, or will have in this step."""

    number: int
    num_tokens: int
    layers: int = 0
    holders: set[int] = field(default_factory=set)  # ids of sequences that still need them


class Encoder:
    """depth: layers of the tower. most: tokens whose features are kept; those of the longest unused go first."""

    def __init__(self, depth: int, most: int) -> None:
        self.depth, self.most = depth, most
        self._entries: OrderedDict[_Key, Entry] = OrderedDict()  # the last one used is at the end
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._dropped: list[int] = []
        self._worth = 0
        self.num_encoded = self.num_hit = 0

    @property
    def num_held(self) -> int:
        """Tokens whose features are kept."""
        return sum(entry.num_tokens for entry in self._entries.values())

    def reach(self, seq: Sequence, budget: int) -> tuple[int, int]:
        """Tokens of `seq` that may run in a step with room for `budget`, and how many of these the tower takes away."""
        cost = 0
        for index, placed in enumerate(() if seq.placement is None else seq.placement.items):
            if placed.stop <= seq.num_computed:
                continue
            before = max(0, placed.start - seq.num_computed)
            left = budget - cost - before
            if left <= 0:  # not in this step
                break
            entry = self._hold(seq, index, placed)
            if entry is None:  # others need all that can be kept
                return before, cost
            cost += self._advance(entry, placed, left)
            if entry.layers < self.depth:
                return before, cost
        return budget - cost, cost

    def passed(self, seq: Sequence) -> None:
        """Let go of pictures that `seq` has in its cache."""
        if seq.placement is None or not seq.features:
            return
        for index, placed in enumerate(seq.placement.items):
            if placed.stop <= seq.num_computed and index in seq.features:
                self._let_go(seq, index)

    def release(self, seq: Sequence) -> None:
        """Let go of all."""
        for index in list(seq.features):
            self._let_go(seq, index)

    def forget(self) -> None:
        """Drop all features; nobody may need them."""
        assert not any(entry.holders for entry in self._entries.values())
        self._dropped += [entry.number for entry in self._entries.values()]
        self._entries.clear()

    def take(self) -> Work:
        """What the last schedule asked for."""
        work = Work(self._dropped, list(self._jobs.values()), self._worth)
        self._dropped, self._jobs, self._worth = [], {}, 0
        return work

    def _hold(self, seq: Sequence, index: int, placed: Placed) -> Entry | None:
        item = placed.item
        key = seq.params.cache_salt, item.kind, item.grid, item.digest
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room(placed.num_tokens):
                return None
            entry = self._entries[key] = Entry(next(self._numbers), placed.num_tokens)
            self.num_encoded += 1
        elif index not in seq.features:
            self.num_hit += 1
        self._entries.move_to_end(key)
        entry.holders.add(seq.id)
        seq.features[index] = entry.number
        return entry

    def _let_go(self, seq: Sequence, index: int) -> None:
        number = seq.features.pop(index)
        if number in seq.features.values():  # the same picture, once more
            return
        for entry in self._entries.values():
            if entry.number == number:
                entry.holders.discard(seq.id)

    def _make_room(self, num_tokens: int) -> bool:
        """Drop what nobody needs until `num_tokens` more can be kept; nothing, where that is not enough."""
        free = self.most - self.num_held
        idle = [(key, entry) for key, entry in self._entries.items() if not entry.holders]
        if free + sum(entry.num_tokens for _, entry in idle) < num_tokens:
            return False
        for key, entry in idle:
            if free >= num_tokens:
                break
            free += entry.num_tokens
            del self._entries[key]
            self._dropped.append(entry.number)
        return True

    def _advance(self, entry: Entry, placed: Placed, left: int) -> int:
        """Plan layers for up to `left` tokens' worth of work, at least one in a step; what it is worth."""
        fit = max(left * self.depth // entry.num_tokens, 0 if self._jobs else 1)
        layers = min(self.depth - entry.layers, fit)
        if not layers:
            return 0
        before = self._jobs.get(entry.number)
        self._jobs[entry.number] = Job(
            number=entry.number,
            layers=layers + (0 if before is None else before.layers),
            item=placed.item if entry.layers == 0 else None if before is None else before.item,
        )
        entry.layers += layers
        worth = -(-layers * entry.num_tokens // self.depth)
        self._worth += worth
        return min(left, worth)
