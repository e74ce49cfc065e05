"""The states of running sequences, for models whose layers store something for each sequence (`whorl.nn.StateSpec`).

A running sequence's state is in its lane. A prefix that is to be found again needs a snapshot of the state at its end,
so a hit is cut at the deepest block that has one; tokens after it are computed again, into the shared blocks, and write
equal bits. Snapshots are kept apart from blocks and evicted by themselves: the least recently used goes first.

Here is the host's side: which lane is to be zeroed, loaded or saved. The device does it in this order, before the next
call that runs. So a snapshot may be evicted while a lane is still to be loaded with it.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .sequence import Sequence

if TYPE_CHECKING:
    from .scheduler import Chunk


class Move(NamedTuple):
    """A copy between a lane and a snapshot. snapshot: -1 zeroes the lane."""

    lane: int
    snapshot: int
    is_saved: bool = False  # from the lane to the snapshot


class StatePool:
    """Up to `num_snapshots` snapshots, and the limits that states set to chunks and drafts.

    state_grid, most_rows: `StateSpec.grid` and `StateSpec.most_rows`. A prompt's state is saved at its end, where its
    tokens stop to be those of earlier sequences, and about every `interval` tokens; any state when its sequence ends or
    is preempted. What is saved is the state at the last multiple of the grid.
    """

    def __init__(
        self, num_snapshots: int, *, state_grid: int, block_size: int, interval: int, most_rows: int | None = None
    ) -> None:
        self.num_snapshots, self.state_grid, self._block_size = num_snapshots, state_grid, block_size
        self._most_drafted = (most_rows or state_grid) - 1
        self.grid = math.lcm(state_grid, block_size)  # where a prefix can be cut, and chunks of prompts end
        self._step, self._interval = self.grid // block_size, interval
        self._free = list(range(num_snapshots))[::-1]
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # by the name of the prefix that ends there
        self.moves: list[Any] = []  # those of blocks as well: see offload.py
        self.num_saved = self.num_loaded = 0

    def cut(self, seq: Sequence) -> int:
        """Return the tokens up to the deepest snapshot of the prefix that the sequence shares."""
        first, step = len(seq.chain) - len(seq.chain) % self._step, self._step
        count = next((n for n in range(first, 0, -step) if seq.chain[n - 1] in self._snapshots), 0)
        seq.branch = first * self._block_size if self.num_snapshots else 0
        return count * self._block_size

    def begin(self, seq: Sequence) -> None:
        """Prepare the lane of an admitted sequence: with the snapshot of its computed prefix, or zeros."""
        snapshot = -1
        if seq.num_computed:
            name = seq.chain[seq.num_computed // self._block_size - 1]
            snapshot = self._snapshots[name]
            self._snapshots.move_to_end(name)
            self.num_loaded += 1
        self.moves.append(Move(seq.lane, snapshot))
        seq.num_in_state = seq.num_computed

    def chunk_length(self, seq: Sequence, length: int) -> int:
        """Return how many of the next `length` tokens of a prompt to compute now: to its end, or to the grid."""
        start, total = seq.num_computed, len(seq.token_ids)
        end = start + length
        if end < total:
            end -= end % self.grid
        last = self._last(seq)
        is_kept = total - total % self.state_grid == last or not self.num_snapshots  # when all tokens are computed
        for stop in (seq.branch, 0 if is_kept else last):
            if start < stop < end:
                end = stop
        return max(0, end - start)

    def _last(self, seq: Sequence) -> int:
        """Return the last point where an equal prompt may begin: at least one token is left to be computed."""
        return (len(seq.token_ids) - 1) // self.grid * self.grid

    def draft_room(self, start: int) -> int:
        """Return the longest draft after the token at `start`: it must not include the last token before the grid, and
        a layer has room for some rows only."""
        return max(0, min(self.state_grid - 2 - start % self.state_grid, self._most_drafted))

    def advance(self, chunks: Iterable["Chunk"]) -> None:
        """Note that chunks have been launched, and save states of prompts where they are due."""
        for chunk in chunks:
            seq, start = chunk.sequence, chunk.start
            seq.num_in_state = end = start + chunk.length
            point = end - end % self.grid
            if chunk.is_decode or point <= start:
                continue
            if point in (seq.branch, self._last(seq)) or point // self._interval > start // self._interval:
                self.save(seq)

    def save(self, seq: Sequence) -> None:
        """Keep a snapshot of the state that the sequence's lane has, unless there is one or its prefix has no name."""
        count, rest = divmod(seq.num_in_state - seq.num_in_state % self.state_grid, self._block_size)
        if rest or not 0 < count <= len(seq.chain) or not self.num_snapshots:
            return
        name = seq.chain[count - 1]
        if name not in self._snapshots:
            self.moves.append(Move(seq.lane, self.adopt(name), is_saved=True))
            self.num_saved += 1
        self._snapshots.move_to_end(name)

    def adopt(self, name: int) -> int:
        """Give a snapshot to a prefix that has none, for a state that is about to be written to it."""
        self._snapshots[name] = self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
        return self._snapshots[name]

    def find(self, name: int) -> int | None:
        """Return the snapshot of a prefix; None if it has none."""
        return self._snapshots.get(name)

    def drop(self, name: int) -> None:
        """Drop the snapshot of a prefix that is no longer in the cache, if it has one."""
        if (snapshot := self._snapshots.pop(name, None)) is not None:
            self._free.append(snapshot)

    def stats(self) -> dict[str, int]:
        """Return the present number of snapshots, and how many states were saved and loaded since the start."""
        return {
            "num_snapshots": len(self._snapshots),
            "num_states_saved": self.num_saved,
            "num_states_loaded": self.num_loaded,
        }

    def take(self) -> list[Any]:
        """Return the moves since the last call, in order."""
        moves = list(self.moves)
        self.moves.clear()
        return moves

    def forget(self) -> None:
        """Drop all snapshots, and all moves of states: no sequence may be running."""
        self._free = list(range(self.num_snapshots))[::-1]
        self._snapshots.clear()
        self.moves[:] = [each for each in self.moves if not isinstance(each, Move)]
