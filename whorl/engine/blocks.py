"""The block pool of the KV cache: which sequences hold a block, and which full blocks hold a prefix to share.

A full block is identified by its tokens, by the contents that placeholders among them stand for, and by the prefix
before it, down to its `Origin`: `BlockPool._key` is the only place that makes this identity. It makes no difference
whether a token came in a prompt or was generated: its keys and values have the same bits. Digests are part of the key
because the placeholders of two images are the same tokens.
"""

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from .offload import Offload
from .sequence import Sequence
from .states import StatePool


class Origin(NamedTuple):
    """What a prefix depends on besides its tokens and their contents; it stands before the first block.

    weights: how often the model's weights have changed. adapter: what is added to them, see `Sequence`. salt: see
    `SamplingParams`.
    """

    weights: int
    adapter: str | None
    salt: str | None


# Content of placeholder tokens of a block: first token in the block, offset in the content, token count, digest.
_Part = tuple[int, int, int, bytes]
# Name of the prefix before the block, or the origin for the first block; the block's tokens; the contents among them.
# Keys are compared, not only hashed, so a hash collision cannot mix two prefixes. A name is a number that is never used
# twice, so an equal key also means that all blocks before it, and the origin, are equal.
_Key = tuple[int | Origin, tuple[int, ...], tuple[_Part, ...]]


class BlockPool:
    """Reference-counted blocks. A free block keeps its prefix until it is reused; least recently used ones go first.

    states: the states of sequences and their snapshots, which a prefix needs as well; None: the model has none.
    beyond: the blocks and snapshots in host memory and in files; None: there are none.
    """

    beyond: Offload | None = None

    def __init__(
        self, num_blocks: int, block_size: int, *, use_prefix_cache: bool = True, states: StatePool | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"BlockPool: {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks, self.block_size, self.use_prefix_cache = num_blocks, block_size, use_prefix_cache
        self.states = states
        # The free blocks: those that hold no prefix, of which the last is taken first, then those that keep one.
        self._empty = list(range(num_blocks))[::-1]
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._names = itertools.count()
        self._prefixes: dict[_Key, tuple[int, int]] = {}  # block and name of the prefix that ends in it
        self._keys: dict[int, _Key] = {}  # by block, if it holds a prefix
        self.num_queried = self.num_hit = 0  # tokens
        self.num_changes = 0  # of the weights

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens need."""
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence, *, reserve: int = 0) -> bool:
        """Give `seq` blocks for all its tokens: first those of the longest cached prefix, whose tokens then count as
        computed, then new ones. Return False and take none if too few are free. reserve: blocks that must stay free."""
        assert not seq.block_table, f"{seq!r} already holds blocks"
        shared = self._match(seq)
        far = self._match_beyond(seq, shared) if self.beyond is not None else []
        num_free = self.num_free - sum(self._num_holders[block] == 0 for block, _ in shared)
        num_new = self.blocks_for(len(seq.token_ids)) - len(shared)
        if num_new + reserve > num_free:
            return False
        if self.beyond is not None:
            self.beyond.hold(far)
        for block, name in shared:
            self._hold(block)
            seq.block_table.append(block)
            seq.chain.append(name)
        seq.block_table += self._take(num_new)
        seq.num_computed = (len(shared) + len(far)) * self.block_size
        if self.beyond is not None:
            self._fetch(self.beyond, seq, far)
        if self.states is not None:
            seq.num_computed = self.states.cut(seq)
        self.num_queried += len(seq.token_ids)
        self.num_hit += seq.num_computed
        return True

    def grow(self, seq: Sequence, length: int) -> bool:
        """Give `seq` blocks for `length` tokens; return False and take none if there are not enough."""
        num_new = self.blocks_for(length) - len(seq.block_table)
        if num_new > self.num_free:
            return False
        if num_new > 0:
            seq.block_table += self._take(num_new)
        return True

    def shrink(self, seq: Sequence) -> None:
        """Free blocks that only a rejected draft needed."""
        num_needed = self.blocks_for(len(seq.token_ids))
        if len(seq.block_table) > num_needed:
            self._drop(seq.block_table[num_needed:][::-1])
            del seq.block_table[num_needed:]

    def publish(self, seq: Sequence) -> None:
        """Put the full blocks of `seq` into the prefix cache. Their step may still be running: the device runs steps in
        order, so a later step that reads a block finds it written."""
        if not self.use_prefix_cache:
            return
        self._name(seq, min(seq.num_computed, len(seq.token_ids)) // self.block_size)

    def _name(self, seq: Sequence, count: int) -> None:
        """Name the prefixes of the first `count` blocks of `seq`."""
        for i in range(len(seq.chain), count):
            key, block = self._key(seq, i), seq.block_table[i]
            # Equal keys mean equal bits: a second copy stays private, and blocks after it continue the first chain.
            if key not in self._prefixes:
                self._prefixes[key] = block, next(self._names)
                self._keys[block] = key
            seq.chain.append(self._prefixes[key][1])

    def release(self, seq: Sequence) -> None:
        """Free the blocks of `seq`, last block first, so that the end of a prefix is reused before its beginning. Its
        state is saved, if it has one."""
        if self.states is not None:
            self.states.save(seq)
        if self.beyond is not None and seq.chain:
            self._spill(self.beyond, seq)
        self._drop(seq.block_table[::-1])
        seq.block_table, seq.chain, seq.num_computed = [], [], 0

    def forget(self) -> None:
        """Clear the prefix cache, because the weights have changed. No sequence may hold a block."""
        assert self.num_used == 0, f"{self.num_used} blocks are held"
        self.num_changes += 1
        if self.beyond is not None:
            self.beyond.forget()
        self._prefixes.clear()
        self._keys.clear()
        if self.states is not None:
            self.states.forget()
        self._empty = [*reversed(self._kept), *self._empty]  # they are taken in the same order as before
        self._kept.clear()

    def take_moves(self) -> list[Any]:
        """Return what the device copies before the next call, in order."""
        if self.beyond is not None:
            return self.beyond.take()
        return [] if self.states is None else self.states.take()

    def census(self, num_runs: int) -> list[tuple[int, int, int]]:
        """Divide the blocks into up to `num_runs` equal runs; return for each how many are held, how many of these by
        several sequences, and how many are free and keep a prefix. Thread-safe; the counts may be out of date."""
        size = -(-self.num_blocks // num_runs)
        holders, with_prefix = list(self._num_holders), set(self._keys)
        counts = []
        for first in range(0, self.num_blocks, size):
            run = range(first, min(first + size, self.num_blocks))
            used = [block for block in run if holders[block]]
            num_reusable = sum(block in with_prefix for block in run if not holders[block])
            counts.append((len(used), sum(holders[block] > 1 for block in used), num_reusable))
        return counts

    def _match(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return blocks and names of the longest cached prefix. At least the last token is left to be computed, because
        its logits are needed, and so are prompt tokens whose log-probabilities are still to be computed."""
        if not self.use_prefix_cache:
            return []
        hits: list[tuple[int, int]] = []
        for i in range(self._limit(seq)):
            hit = self._prefixes.get(self._key(seq, i, parent=hits[-1][1] if hits else None))
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _key(self, seq: Sequence, index: int, parent: int | None = None) -> _Key:
        """Return the identity of block `index` of `seq`: blocks of equal keys have equal bits.

        parent: name of the prefix before it; None: from `seq.chain`.
        """
        prefix: int | Origin
        if index:
            prefix = seq.chain[index - 1] if parent is None else parent
        else:
            prefix = Origin(self.num_changes, seq.adapter, seq.params.cache_salt)
        first, end = index * self.block_size, (index + 1) * self.block_size
        return prefix, tuple(seq.token_ids[first:end]), _parts(seq, first, end)

    def _limit(self, seq: Sequence) -> int:
        """Return how many blocks of a sequence may come from a cache."""
        limit = len(seq.token_ids) - 1
        if seq.num_unscored:
            limit = min(limit, len(seq.prompt_logprobs))
        return limit // self.block_size

    # ---- beyond the device

    def digests(self, beyond: Offload, seq: Sequence, count: int) -> list[str]:
        """Return the names, in all processes, of the prefixes of the first `count` blocks: digests of their keys."""
        if seq.digests[0] != beyond.identity:
            seq.digests = beyond.identity, []
        names = seq.digests[1]
        for i in range(len(names), count):
            origin, tokens, parts = self._key(seq, i, parent=0)
            root = origin[1:] if isinstance(origin, Origin) else None  # the identity knows the weights themselves
            names.append(beyond.name(names[-1] if names else None, root, tokens, parts))
        return names[:count]

    def read_ahead(self, seq: Sequence) -> None:
        """Begin to read what files have of a waiting sequence's prefix."""
        if self.beyond is None or not self.beyond.sizes.disk:
            return
        hits = self._match(seq)
        names = self.digests(self.beyond, seq, self._limit(seq))
        seq.reads = self.beyond.read_ahead(names, len(hits), has_state=self._has_state(hits))

    def _has_state(self, hits: list[tuple[int, int]]) -> Callable[[int], bool]:
        """Return a function that returns whether the device has the state after so many blocks of the prefix."""
        states = self.states
        return lambda n: states is None or (n <= len(hits) and states.find(hits[n - 1][1]) is not None)

    def _match_beyond(self, seq: Sequence, hits: list[tuple[int, int]]) -> list[str]:
        """Return the names of the blocks in host memory that go on with the prefix in these blocks."""
        assert self.beyond is not None
        if not self.use_prefix_cache:
            return []
        names = self.digests(self.beyond, seq, self._limit(seq))
        return names[len(hits) : self.beyond.reach(names, len(hits), has_state=self._has_state(hits))]

    def _fetch(self, beyond: Offload, seq: Sequence, far: list[str]) -> None:
        """Fetch blocks into those that the sequence got for them, and the deepest state that the device lacks."""
        first = len(seq.chain)
        self._name(seq, first + len(far))
        beyond.fetch(zip(seq.block_table[first:], far, strict=False))
        states = self.states
        if states is None or not states.num_snapshots:
            return
        names = self.digests(beyond, seq, len(seq.chain))
        for chain, name in zip(reversed(seq.chain), reversed(names), strict=True):
            if states.find(chain) is not None:
                return
            if beyond.has_snapshot(name):
                beyond.fetch_snapshot(states.adopt(chain), f"{name}s")
                return

    def _spill(self, beyond: Offload, seq: Sequence) -> None:
        """Let the full blocks of a sequence, and its snapshots, go to the host."""
        names = self.digests(beyond, seq, len(seq.chain))
        beyond.spill(zip(seq.block_table, names, strict=False))
        if self.states is None:
            return
        for chain, name in zip(seq.chain, names, strict=True):
            if (snapshot := self.states.find(chain)) is not None:
                beyond.spill_snapshot(snapshot, f"{name}s")

    def _hold(self, block: int) -> None:
        """Hold a block that keeps a prefix; it may be free or held by others."""
        self._num_holders[block] += 1
        self._kept.pop(block, None)

    # A long sequence has thousands of blocks, and all others wait while they are taken or freed. So both functions
    # handle all blocks of a sequence at once.

    def _take(self, count: int) -> list[int]:
        """Take so many free blocks: first those that hold no prefix, then the least recently used prefixes."""
        first = max(0, len(self._empty) - count)
        blocks = self._empty[first:][::-1]
        del self._empty[first:]
        for _ in range(count - len(blocks)):
            block, _ = self._kept.popitem(last=False)
            _, name = self._prefixes.pop(self._keys.pop(block))
            if self.states is not None:
                self.states.drop(name)
            blocks.append(block)
        for block in blocks:
            self._num_holders[block] = 1
        if self.beyond is not None:
            self.beyond.taken(blocks)
        return blocks

    def _drop(self, blocks: list[int]) -> None:
        """Give up blocks, in this order; those that nobody else holds become free."""
        holders, keys = self._num_holders, self._keys
        for block in blocks:
            holders[block] -= 1
        freed = [block for block in blocks if holders[block] <= 0]
        assert sum([holders[block] for block in freed]) == 0, f"a block of {freed} was dropped more often than held"
        if not keys:
            self._empty += freed
            return
        self._empty += [block for block in freed if block not in keys]
        for block in freed:
            if block in keys:
                self._kept[block] = None


def _parts(seq: Sequence, first: int, end: int) -> tuple[_Part, ...]:
    """Return the parts of contents that overlap tokens `first` to `end - 1`."""
    parts, i = [], bisect.bisect_right(seq.contents, first, key=lambda content: content.span.stop)
    while i < len(seq.contents) and (span := seq.contents[i].span).start < end:
        start, stop = max(first, span.start), min(end, span.stop)
        parts.append((start - first, start - span.start, stop - start, seq.contents[i].digest))
        i += 1
    return tuple(parts)
