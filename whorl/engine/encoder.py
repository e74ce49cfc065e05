"""The encoder decides which images the vision tower encodes in a step, and whose features are kept.

An image is encoded when the first of its placeholder tokens is scheduled, once for all sequences that contain it. The
layers of the tower count against the step's token budget: an image that costs more than the budget left runs only some
layers in this step and the others in the next steps. So decoding sequences wait for at most one layer more than they
would for text.

All of this is decided on the host; the runner executes it and holds the tensors, by number.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from whorl.media import MediaItem

from .placing import PlacedMedia
from .sequence import Sequence

# Equal keys have equal features. The request's cache salt is part of the key, so that a request cannot learn from
# timing which images others have sent; and so is an adapter of the tower.
_Key = tuple[str | None, str | None, str, tuple[int, int, int], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The tower's work for one image in a step: `layers` to run. item: the image, if these are the first; else None.
    slot: of the adapter that updates the tower; -1: none."""

    number: int
    layers: int
    item: MediaItem | None = None
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Work:
    """The work of the tower in one step: features to drop first, jobs to run, and their cost in tokens."""

    dropped: list[int]
    jobs: list[Job]
    num_tokens: int


NO_WORK = Work([], [], 0)


@dataclass(slots=True, eq=False)
class Entry:
    """An image whose features are kept or in progress: `layers` of the tower have run or will run in this step."""

    number: int
    num_tokens: int
    layers: int = 0
    holders: set[int] = field(default_factory=set)  # ids of sequences that still need them
    slot: int = -1  # of the tower's adapter


class Encoder:
    """Plans the tower's work. depth: layers of the tower. most: tokens whose features are kept; the least recently used
    are dropped first. grid: chunks of prompts end at its multiples; a sequence that holds images and needs one more to
    reach the next multiple may exceed `most`."""

    def __init__(self, depth: int, most: int, *, grid: int = 1) -> None:
        self.depth, self.most, self._grid = depth, most, grid
        self._entries: OrderedDict[_Key, Entry] = OrderedDict()  # the most recently used is last
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._dropped: list[int] = []
        self._cost = 0
        self.num_encoded = self.num_hit = 0

    @property
    def num_held(self) -> int:
        """Number of tokens whose features are kept."""
        return sum(entry.num_tokens for entry in self._entries.values())

    def stats(self) -> dict[str, int]:
        """Return the counters of `LLM.stats`."""
        counts = {"num_encoded": self.num_encoded, "num_encoder_hits": self.num_hit}
        return {**counts, "num_encoder_tokens": self.num_held}

    def plan(self, seq: Sequence, budget: int) -> tuple[int, int]:
        """Plan the tower's work for the next tokens of `seq`; return how many of them the step may compute, and how
        much of the budget the tower takes. Tokens of an image can be computed once all layers have run for it."""
        cost = 0
        for index, placed in enumerate(() if seq.placement is None else seq.placement.items):
            if placed.stop <= seq.num_computed:
                continue
            num_before = max(0, placed.start - seq.num_computed)
            left = budget - cost - num_before
            if left <= 0:  # the image is not reached in this step
                break
            # Else it would wait for room that only its own next chunk can make.
            must_have = 1 < self._grid > num_before and bool(seq.features)
            entry = self._hold(seq, index, placed, must_have=must_have)
            if entry is None:  # images of other sequences fill the cache
                return num_before, cost
            cost += self._advance(entry, placed, left)
            if entry.layers < self.depth:
                return num_before, cost
        return budget - cost, cost

    def passed(self, seq: Sequence) -> None:
        """Release images whose tokens `seq` has in the KV cache."""
        if seq.placement is None or not seq.features:
            return
        for index, placed in enumerate(seq.placement.items):
            if placed.stop <= seq.num_computed and index in seq.features:
                self._let_go(seq, index)

    def release(self, seq: Sequence) -> None:
        """Release all images of `seq`."""
        for index in list(seq.features):
            self._let_go(seq, index)

    def forget(self) -> None:
        """Drop all features. No sequence may hold any."""
        assert not any(entry.holders for entry in self._entries.values())
        self._dropped += [entry.number for entry in self._entries.values()]
        self._entries.clear()

    def take(self) -> Work:
        """Return the work that has been planned since the last call."""
        work = Work(self._dropped, list(self._jobs.values()), self._cost)
        self._dropped, self._jobs, self._cost = [], {}, 0
        return work

    def _hold(self, seq: Sequence, index: int, placed: PlacedMedia, *, must_have: bool) -> Entry | None:
        """Return the entry of an image, held by `seq`; None if it is new and the cache has no room for it.

        index: of the image in the sequence's placement. must_have: it gets an entry in any case.
        """
        item = placed.item
        adapter = seq.adapter if seq.vision_slot >= 0 else None
        key = seq.params.cache_salt, adapter, item.kind, item.grid, item.digest
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room(placed.num_tokens) and not must_have:
                return None
            entry = self._entries[key] = Entry(next(self._numbers), placed.num_tokens, slot=seq.vision_slot)
            self.num_encoded += 1
        elif index not in seq.features:
            self.num_hit += 1
        self._entries.move_to_end(key)
        entry.holders.add(seq.id)
        seq.features[index] = entry.number
        return entry

    def _let_go(self, seq: Sequence, index: int) -> None:
        number = seq.features.pop(index)
        if number in seq.features.values():  # the sequence contains the same image again
            return
        for entry in self._entries.values():
            if entry.number == number:
                entry.holders.discard(seq.id)

    def _make_room(self, num_tokens: int) -> bool:
        """Drop unused features until `num_tokens` more can be kept; return False and drop none if it is impossible."""
        free = self.most - self.num_held
        unused = [(key, entry) for key, entry in self._entries.items() if not entry.holders]
        if free + sum(entry.num_tokens for _, entry in unused) < num_tokens:
            return False
        for key, entry in unused:
            if free >= num_tokens:
                break
            free += entry.num_tokens
            del self._entries[key]
            self._dropped.append(entry.number)
        return True

    def _advance(self, entry: Entry, placed: PlacedMedia, left: int) -> int:
        """Plan layers that cost up to `left` tokens, but at least one if the step has no other job, so that every step
        makes progress; return their cost, at most `left`. All layers together cost the image's tokens."""
        fit = max(left * self.depth // entry.num_tokens, 0 if self._jobs else 1)
        layers = min(self.depth - entry.layers, fit)
        if not layers:
            return 0
        planned = self._jobs.get(entry.number)
        self._jobs[entry.number] = Job(
            number=entry.number,
            slot=entry.slot,
            layers=layers + (0 if planned is None else planned.layers),
            item=placed.item if entry.layers == 0 else None if planned is None else planned.item,
        )
        entry.layers += layers
        cost = -(-layers * entry.num_tokens // self.depth)
        self._cost += cost
        return min(left, cost)
